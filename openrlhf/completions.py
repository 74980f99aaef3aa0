"""Requests for tokens and their answers.

Both have vLLM's names, because users' agents write one and read the other. Each engine translates them into
its own.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:  # users' files are checked without what takes seconds
    import numpy as np

    from openrlhf.types import KeptSets


@dataclass(kw_only=True)
class SamplingParams:
    """How one request samples. Attributes beside these fields are options of a single engine, under its own
    names; an engine that does not know one refuses it."""

    n: int = 1
    """Answers to the prompt."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    """The least probability of a token, relative to that of the most likely one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    """Answer i of n samples with `seed + i`."""
    max_tokens: int | None = None
    """None: as many as the engine has room for."""
    min_tokens: int = 0
    """Before any stop token may be sampled."""
    stop: list[str] | None = field(default_factory=list)
    """Texts that end an answer."""
    stop_token_ids: list[int] | None = field(default_factory=list)
    """Tokens that end an answer, and are its last."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Only `stop` and `stop_token_ids` end an answer, not the model's own end-of-sequence token."""
    logprobs: int | None = None
    """Likely tokens of each position whose log-probs are returned beside the sampled token's. -1: all;
    None: no log-probs at all."""
    prompt_logprobs: int | None = None
    detokenize: bool = True
    """The answer also comes as text."""
    skip_special_tokens: bool = True
    max_kept_tokens: int = 0
    """Tokens of each position's kept set that the answer reports. 0: none."""

    def clone(self) -> Self:
        """Returns a copy that shares nothing."""
        return copy.deepcopy(self)

    @property
    def is_truncated(self) -> bool:
        """Whether top-p, top-k or min-p may keep less than all tokens."""
        return self.temperature > 0 and (self.top_p != 1 or self.top_k > 0 or self.min_p != 0)

    @classmethod
    def of(cls, given: Any) -> "SamplingParams":
        """Returns `given`, or where it is vLLM's own record a copy: of fields that only vLLM has, those that
        are not at their defaults."""
        if isinstance(given, cls):
            return given
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
    """1 for the most likely token. None: not known."""


@dataclass(kw_only=True)
class Completion:
    """One answer. Attributes beside these fields are those of the engine's own record."""

    index: int
    """Its number among the answers to the same request."""
    token_ids: Sequence[int]
    """(A,) with the stop token that ended it."""
    text: str
    """"" where the request wanted none."""
    finish_reason: str
    """stop, length or abort."""
    logprobs: Sequence[Mapping[int, Any]] | None = None
    """Maps the tokens of each position, the sampled one first, to a `LogProb`; made as it is read. None where
    the request asked for none."""
    log_probs: "np.ndarray | None" = None
    """(A,) float32: those of the sampled tokens, under the distribution that was sampled from."""
    versions: "np.ndarray"
    """(R, 2) int32: versions of the weights, and how many tokens in a row each sampled."""
    kept: "KeptSets | None" = None
    """The tokens that each action was chosen from. None: all, or not asked for."""
    routing: "np.ndarray | None" = None
    """(P + A, M, K): the experts that read each token of prompt and answer, see `Turn`. None: not known."""
    own: Any = None
    """The engine's own record."""

    def __getattr__(self, name: str) -> Any:
        return _of_own(self, name)


@dataclass(kw_only=True)
class Completions:
    """The answers to one request. Attributes beside these fields are those of the engine's own record."""

    prompt_token_ids: Sequence[int]
    """As the model read them: with all tokens of its images."""
    outputs: Sequence[Completion]
    own: Any = None
    """The engine's own record."""

    def __getattr__(self, name: str) -> Any:
        return _of_own(self, name)


def _of_own(record: Completion | Completions, name: str) -> Any:
    own = vars(record).get("own")
    if own is None:
        raise AttributeError(f"{type(record).__name__} has no {name!r}, nor does this engine know of it")
    return getattr(own, name)
