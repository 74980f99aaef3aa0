"""Sampling requests to an engine, and their answers.

Both use vLLM's names, because users' agents write the one and read the other. Each engine translates them to
and from its own records.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:  # users' files are checked without imports that take seconds
    import numpy as np

    from openrlhf.types import Nuclei


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling options of one request. Attributes beside these fields are options of a single engine, under
    its own names; an engine that does not know one refuses it."""

    n: int = 1
    """Number of answers to the prompt."""
    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 or -1: all tokens."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to that of the most likely token."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    """Seed of the request: answer i of n is sampled with `seed + i`."""
    max_tokens: int | None = None
    """Maximum number of sampled tokens. None: as many as the engine has room for."""
    min_tokens: int = 0
    """Number of tokens before a stop token may be sampled."""
    stop: list[str] | None = field(default_factory=list)
    """Texts that end an answer."""
    stop_token_ids: list[int] | None = field(default_factory=list)
    """Tokens that end an answer, and are included as its last token."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """True if only `stop` and `stop_token_ids` end an answer, not the model's end-of-sequence token."""
    logprobs: int | None = None
    """Number of most likely tokens per position whose log-probs are returned beside the sampled token's.
    -1: all; None: no log-probs at all."""
    prompt_logprobs: int | None = None
    detokenize: bool = True
    """Whether the answer also comes as text."""
    skip_special_tokens: bool = True
    max_kept_tokens: int = 0
    """Number of tokens of each position's top-p/top-k nucleus that the answer reports. 0: none."""
    num_likely: int = 0
    """Number of each position's most likely tokens that the answer reports in `likely`. 0: none."""

    def clone(self) -> Self:
        """Returns a deep copy."""
        return copy.deepcopy(self)

    @property
    def is_truncated(self) -> bool:
        """Whether top-p, top-k or min-p may exclude tokens."""
        return self.temperature > 0 and (self.top_p != 1 or self.top_k > 0 or self.min_p != 0)

    @classmethod
    def of(cls, given: Any) -> "SamplingParams":
        """Returns `given`, or a copy of vLLM's own record. Fields that only vLLM has are copied unless they
        are at their defaults. Raises TypeError for anything else."""
        if isinstance(given, cls):
            return given
        if not hasattr(given, "__struct_fields__"):
            text = f"sampling_params is the {type(given).__name__} {given!r}, not SamplingParams"
            raise TypeError(f"{text}: change and return those that the agent received")
        plain, names = type(given)(), {f.name for f in fields(cls)}
        found = cls()
        for name in given.__struct_fields__:
            value, default = getattr(given, name), getattr(plain, name)
            is_default = value is default or (type(value) is type(default) and value == default)
            if name in names or not (name.startswith("_") or is_default):
                setattr(found, name, value)
        return found


class LogProb(NamedTuple):
    """A token's log-prob at one position."""

    logprob: float
    rank: int | None = None
    """Rank of the token by probability, 1 for the most likely. None: not known."""


class _Record:
    """A record whose other attributes are those of the engine's own record, `own`."""

    def __getattr__(self, name: str) -> Any:
        own = vars(self).get("own")
        if own is None:
            raise AttributeError(f"{type(self).__name__} has no {name!r}, nor does this engine know of it")
        return getattr(own, name)


@dataclass(kw_only=True)
class Completion(_Record):
    """One answer to a request. Other attributes are read from the engine's own record."""

    index: int
    """Index among the answers to the same request."""
    token_ids: Sequence[int]
    """(A,) sampled tokens, with the stop token that ended the answer."""
    text: str
    """The answer as text; "" if the request asked for none."""
    finish_reason: str
    """Reason why the answer ended: stop, length or abort."""
    logprobs: Sequence[Mapping[int, Any]] | None = None
    """For each position, tokens -> `LogProb`, the sampled token first; built when read. None if the request
    asked for none."""
    log_probs: "np.ndarray | None" = None
    """(A,) float32 log-probs of the sampled tokens, under the distribution that was sampled from."""
    versions: "np.ndarray"
    """(R, 2) int32: weight versions, and the number of consecutive tokens that each sampled."""
    kept: "Nuclei | None" = None
    """Top-p/top-k nucleus that each action was sampled from. None: all tokens, or not asked for."""
    likely: "np.ndarray | None" = None
    """(A, num_likely) `types.LIKELY`: the most likely tokens, the likeliest first, with their log-probs under
    the distribution that was sampled from. None: not asked for."""
    routing: "np.ndarray | None" = None
    """(P + A, M, K): the experts that read each token of prompt and answer, see `Turn`. None: not known."""
    own: Any = None
    """The engine's own record of this answer."""


@dataclass(kw_only=True)
class Completions(_Record):
    """The answers to one request. Other attributes are read from the engine's own record."""

    prompt_token_ids: Sequence[int]
    """The prompt as the model read it, with all tokens of its images."""
    outputs: Sequence[Completion]
    own: Any = None
    """The engine's own record."""
