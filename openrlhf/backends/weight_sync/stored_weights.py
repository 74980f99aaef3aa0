"""Checks that engines compute with the weights that they were sent.

A checksum covers the input of an engine's loader, but not what the engine makes of it: fused and packed
copies, tied heads, buffers, adapters. So after every weight sync trainer and engines compute the log-probs of
the same tokens, the probe, and must agree.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.errors import ErrorCode, RunError
from openrlhf.models.vision import SHAPES, ImageReader
from openrlhf.types import Image

PROBE_TOKENS = 128
ROUNDING = {"fp32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of one rounding for each `--ds.param_dtype`. GPUs may round the factors of float32
products to TF32."""
FLOAT32_ON_CPU = 2.0**-17
"""Relative error of a float32 product on a CPU: n additions with errors of 2^-24 and random signs, for n up
to 2^14."""
ROUNDINGS = 32
"""Number of rounding errors that may add up. Independent errors grow with the square root of their number: 32
for 256 layers with 4 roundings each."""
OTHER_EXPERTS = 2.0**-3
"""Allowed difference of log-probs, in units of their spread, for a mixture of experts in any precision: a
router near a tie sends a token to another expert, and all later tokens attend to it."""
LEAST_SPREAD = 0.01
"""Smallest spread of log-probs, in nats, as the unit of differences."""
PROJECTIONS = 16
"""Number of random projections in the sketch of a weight."""
LEAST_EFFECT = 4.0
"""Smallest effect of a random adapter on the log-probs of a probe, in multiples of the allowed difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProbe:
    """An engine's answer to a probe."""

    log_probs: list[float]
    """(L - 1,) log-probs of every token but the first, at temperature 1."""
    version: int
    """Version of the weights that computed them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Tokens by which trainer and engines are compared, the same ones in every process of a run."""

    token_ids: list[int]
    """(L,) tokens as the trainer reads them, with all tokens of a picture."""
    asked: list[int]
    """The same tokens as in an engine's request, with one placeholder in place of the picture's tokens."""
    images: tuple[Image, ...] = ()


def make_probe(tokenizer: PreTrainedTokenizerBase, reader: ImageReader | None, max_len: int) -> Probe:
    """Returns a probe of at most `max_len` tokens, with a picture in front where the policy has a `reader` of
    images."""
    if reader is None:
        tokens = probe_of(tokenizer, min(PROBE_TOKENS, max_len))
        return Probe(token_ids=tokens, asked=tokens)
    processor, picture = reader.processor, reader.noise(SHAPES[0])
    placeholder = processor.tokenizer(processor.image_token, add_special_tokens=False)["input_ids"]
    read = picture.token_ids.tolist()
    tokens = probe_of(tokenizer, min(PROBE_TOKENS, max_len - len(read)))
    return Probe(token_ids=[*read, *tokens], asked=[*placeholder, *tokens], images=picture.images)


def probe_of(tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
    """Returns at most `length` tokens: the tokenizer's BOS token where it has one, then ordinary tokens drawn
    at random, the same ones at every call."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = torch.tensor(sorted(set(tokenizer.get_vocab().values()) - special))
    drawn = torch.randint(len(ordinary), (length,), generator=torch.Generator().manual_seed(0))
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*first, *ordinary[drawn].tolist()][:length]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The largest mean difference between two sets of log-probs of a probe that rounding explains.

    Errors of logits grow with the logits, so differences are measured in units of the trainer's spread, the
    mean of |log p - mean log p|. Wrong weights cause differences of about 1.
    """

    dtype: str
    """Dtype of the weights: fp32, fp16 or bf16."""
    on_gpu: bool
    has_experts: bool = False

    @property
    def relative(self) -> float:
        """Relative error by rounding alone, without routers."""
        exact = self.dtype == "fp32" and not self.on_gpu
        return ROUNDINGS * (FLOAT32_ON_CPU if exact else ROUNDING[self.dtype])

    def allowed(self, trainer: Tensor) -> float:
        """Returns the limit in nats, given the trainer's log-probs (L - 1,) of a probe."""
        relative = max(self.relative, OTHER_EXPERTS) if self.has_experts else self.relative
        return relative * _spread(trainer)


def check_stored(trainer: Tensor, number: int, engine: EngineProbe, limit: Limit) -> float:
    """Returns the mean difference between an engine's and the trainer's log-probs (L - 1,) of the same
    version, in units of their spread. Raises DifferentWeightsError where it is more than `limit` allows.

    `number`: the engine's number.
    """
    theirs = torch.tensor(engine.log_probs)
    difference = (theirs - trainer).abs()
    if not difference.mean() <= limit.allowed(trainer):  # NaN is not either
        worst = int(difference.nan_to_num(math.inf).argmax())
        kind = limit.dtype + " with experts" * limit.has_experts
        text = (
            f"weight sync {engine.version}: inference engine {number} does not compute with the weights that "
            f"the trainer sent. Their log-probs of {len(difference)} tokens differ by "
            f"{difference.mean():.3g} nats on average, {difference.max():.3g} at most; rounding in {kind} "
            f"explains {limit.allowed(trainer):.3g}.\n"
            f"The log-prob of token {worst + 1} is {theirs[worst]:.6g} in the engine, {trainer[worst]:.6g} "
            "in the trainer."
        )
        raise DifferentWeightsError(ErrorCode.WRONG_WEIGHTS, text)
    return float(difference.mean()) / _spread(trainer)


class DifferentWeightsError(RunError):
    """Raised when an engine computes with other weights than the trainer's."""


def check_adapter(plain: Tensor, adapted: Tensor, limit: Limit) -> None:
    """Raises RunError where a random adapter hardly moves the trainer's own log-probs, (L - 1,) each: the
    probe could not tell an engine that applies the adapter from one that does not."""
    moved, least = float((adapted - plain).abs().mean()), LEAST_EFFECT * limit.allowed(plain)
    if not moved >= least:
        text = (
            f"a random adapter hardly changes the trainer's log-probs: those of {len(plain)} tokens differ "
            f"by {moved:.3g} nats on average, and {least:.3g} is the least by which the check could tell "
            "whether engines apply adapters.\nUse merged, and look at --ds.lora.target_modules."
        )
        raise RunError(ErrorCode.WRONG_WEIGHTS, text, flag="--vllm.lora_sync", value="adapter")


class Sketch(NamedTuple):
    """A summary of a weight in a few numbers: of a matrix's product with a random input, or of a vector."""

    length: int
    size: float
    """Root mean square of the summarized vector's elements."""
    projections: tuple[float, ...]
    """Projections onto random directions, in units of an element; wrong weights move them by about `size`."""

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Sketches a vector (n,)."""
        numbers = values.detach().double().cpu()
        directions = random_input(PROJECTIONS * len(numbers)).double().view(PROJECTIONS, -1)
        projections = (directions @ numbers / math.sqrt(len(numbers))).tolist()
        return cls(len(numbers), float((numbers**2).mean().sqrt()), tuple(projections))

    def distance(self, other: "Sketch") -> float:
        """Returns the distance in units of an element: about the root mean square of the differences."""
        return math.dist(self.projections, other.projections) / math.sqrt(PROJECTIONS)


def random_input(size: int) -> Tensor:
    """Returns a random (size,) float32 vector, the same in every process."""
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def sketches(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Sketch]:
    """Sketches the vectors and matrices among the named tensors of a checkpoint."""
    found = {}
    for name, weight in weights:
        if weight.dim() == 2:
            found[name] = Sketch.of(weight.detach().float() @ random_input(weight.shape[1]).to(weight.device))
        elif weight.dim() == 1:
            found[name] = Sketch.of(weight)
    return found


def differing_weights(sent: Mapping[str, Sketch], stored: Mapping[str, Sketch], relative: float) -> list[str]:
    """Returns the names of weights whose sketches in an engine's layers differ from those the trainer sent,
    in the order of sending. `relative`: the relative error that rounding explains."""
    return [
        name
        for name, ours in sent.items()
        if name in stored and not ours.distance(stored[name]) <= relative * ours.size
    ]


def reason_of(unwritten: Sequence[str], different: Sequence[str], num_compared: int) -> str:
    """Returns a message on why an engine's log-probs differ. `unwritten`: parameters that no sync has
    written; `different`: weights that differ in its layers, among `num_compared`."""
    if unwritten:
        return f"The sync did not write {_some(unwritten)}: nothing was sent for it, or vLLM skipped it."
    if different:
        return (
            f"Of {num_compared} weights that were read back from the engine's layers, the first that differs "
            f"is {_some(different)}: vLLM changed the weight while it stored it, or kept an old copy."
        )
    return (
        f"vLLM keeps a copy of some weights that the sync did not renew, or computes this architecture in "
        f"another way than transformers does ({num_compared} weights were read back, and are right).\nIts "
        "samples are not the policy's, so training would go wrong. Try another --ds.attn_implementation, or "
        "other versions of transformers and vLLM."
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _spread(trainer: Tensor) -> float:
    return max(float((trainer - trainer.mean()).abs().mean()), LEAST_SPREAD)
