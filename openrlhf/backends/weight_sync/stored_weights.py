"""Checks that engines compute with the weights that the trainer sent.

A checksum covers the input of an engine's loader, but not the engine's use of it: fused and packed copies,
tied heads, buffers, adapters. After every weight sync trainer and engines therefore compute the log-probs of
the same tokens, the probe, which must agree.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.config.ppo import ACTOR_FLAG, PPOConfig
from openrlhf.errors import ErrorCode, RunError
from openrlhf.models.configurations import has_experts
from openrlhf.models.tokenizers import load_run_tokenizer
from openrlhf.models.vision import SHAPES, ImageReader, image_reader
from openrlhf.types import Image

PROBE_TOKENS = 128
"""Number of tokens of a probe, besides those of a picture."""
ROUNDING = {"fp32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Maximum relative error of one rounding, by `--ds.param_dtype`. GPUs may round the factors of float32
products to TF32."""
FLOAT32_ON_CPU = 2.0**-17
"""Relative error of a dot product in float32 on a CPU: n additions with errors of 2^-24 and random signs, for
n up to 2^14."""
ROUNDINGS = 32
"""Allowed error as a multiple of one rounding error. Independent errors grow with the square root of their
number: 32 for 256 layers with 4 roundings each."""
ROUTER_TOLERANCE = 2.0**-3
"""Allowed difference of log-probs, in units of their spread, for mixtures of experts in any precision.
Rounding may route a token to another expert, and all later tokens attend to it."""
LEAST_SPREAD = 0.01
"""Lower bound in nats of the spread, the unit of differences."""
PROJECTIONS = 16
"""Number of random projections in the fingerprint of a weight."""
LEAST_EFFECT = 4.0
"""Minimum change of a probe's log-probs by a random adapter, in multiples of the allowed difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProbe:
    """An engine's answer to a probe."""

    log_probs: list[float]
    """(L - 1,) log-probs of every token but the first, at temperature 1."""
    version: int
    """Version of the weights that computed them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The tokens on which trainer and engines are compared, the same in all processes of a run."""

    token_ids: list[int]
    """(L,) tokens as the trainer reads them, with all placeholder tokens of a picture."""
    asked: list[int]
    """The same tokens as an engine's request has them, with a single placeholder for the picture."""
    images: tuple[Image, ...] = ()


def make_probe(tokenizer: PreTrainedTokenizerBase, reader: ImageReader | None, max_len: int) -> Probe:
    """Returns a probe of at most `max_len` tokens. It begins with a picture if the policy has a `reader` of
    images."""
    if reader is None:
        tokens = build_probe(tokenizer, min(PROBE_TOKENS, max_len))
        return Probe(token_ids=tokens, asked=tokens)
    processor, picture = reader.processor, reader.noise(SHAPES[0])
    placeholder = processor.tokenizer(processor.image_token, add_special_tokens=False)["input_ids"]
    read = picture.token_ids.tolist()
    tokens = build_probe(tokenizer, min(PROBE_TOKENS, max_len - len(read)))
    return Probe(token_ids=[*read, *tokens], asked=[*placeholder, *tokens], images=picture.images)


def build_run_probe(config: PPOConfig) -> Probe:
    """Returns the probe of a run, whose policy may read images."""
    reader = image_reader(config.actor.model_name_or_path) if config.reads_images else None
    return make_probe(load_run_tokenizer(config), reader, config.data.max_len - 1)


def build_probe(tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
    """Returns at most `length` token ids: the tokenizer's BOS token if it has one, then random ordinary
    tokens, the same in every call."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = torch.tensor(sorted(set(tokenizer.get_vocab().values()) - special))
    drawn = torch.randint(len(ordinary), (length,), generator=torch.Generator().manual_seed(0))
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*first, *ordinary[drawn].tolist()][:length]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The maximum mean difference between two sets of log-probs of a probe up to which rounding explains it.

    Errors of logits grow with the logits. Differences are therefore measured in units of the spread of the
    trainer's log-probs, the mean of |log p - mean log p|. Wrong weights cause differences of about 1.
    """

    dtype: str
    """Dtype of the weights: fp32, fp16 or bf16."""
    on_gpu: bool
    has_experts: bool = False

    @classmethod
    def from_config(cls, config: PPOConfig, *, on_gpu: bool) -> Self:
        """Returns the limit of a run's policy."""
        experts = has_experts(config.actor.model_name_or_path, ACTOR_FLAG)
        return cls(dtype=config.ds.param_dtype, on_gpu=on_gpu, has_experts=experts)

    @property
    def relative(self) -> float:
        """Relative error that rounding explains in models without experts."""
        exact = self.dtype == "fp32" and not self.on_gpu
        return ROUNDINGS * (FLOAT32_ON_CPU if exact else ROUNDING[self.dtype])

    def allowed(self, trainer: Tensor) -> float:
        """Returns the limit in nats. `trainer` (L - 1,): the trainer's log-probs of the probe."""
        relative = max(self.relative, ROUTER_TOLERANCE) if self.has_experts else self.relative
        return relative * _spread(trainer)


def check_stored(trainer: Tensor, number: int, engine: EngineProbe, limit: Limit) -> float:
    """Returns the mean difference between an engine's and the trainer's log-probs (L - 1,) of the same weight
    version, in units of their spread. Raises DifferentWeightsError if it exceeds `limit`.

    `number`: index of the engine.
    """
    theirs = torch.tensor(engine.log_probs)
    difference = (theirs - trainer).abs()
    if not difference.mean() <= limit.allowed(trainer):  # also true for NaN
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
    """Raised if an engine computes with other weights than the trainer's."""


def check_adapter(plain: Tensor, adapted: Tensor, limit: Limit) -> None:
    """Raises RunError if a random adapter hardly changes the trainer's log-probs, (L - 1,) without (`plain`)
    and with the adapter (`adapted`). The probe could then not detect an engine that ignores adapters."""
    moved, least = float((adapted - plain).abs().mean()), LEAST_EFFECT * limit.allowed(plain)
    if not moved >= least:
        text = (
            f"a random adapter hardly changes the trainer's log-probs: those of {len(plain)} tokens differ "
            f"by {moved:.3g} nats on average, and a check of engines that ignore adapters needs at least "
            f"{least:.3g}.\nUse merged, or check --ds.lora.target_modules."
        )
        raise RunError(ErrorCode.WRONG_WEIGHTS, text, flag="--vllm.lora_sync", value="adapter")


class WeightFingerprint(NamedTuple):
    """A few numbers that summarize a vector, or a matrix by its product with a random input."""

    length: int
    size: float
    """Root mean square of the vector's elements."""
    projections: tuple[float, ...]
    """Projections of the vector onto random directions, scaled to the size of an element. Wrong weights
    change them by about `size`."""

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Computes the fingerprint of a vector (n,)."""
        numbers = values.detach().double().cpu()
        directions = random_input(PROJECTIONS * len(numbers)).double().view(PROJECTIONS, -1)
        projections = (directions @ numbers / math.sqrt(len(numbers))).tolist()
        return cls(len(numbers), float((numbers**2).mean().sqrt()), tuple(projections))

    def distance(self, other: "WeightFingerprint") -> float:
        """Returns the distance, which estimates the root mean square of the differences between elements."""
        return math.dist(self.projections, other.projections) / math.sqrt(PROJECTIONS)


def random_input(size: int) -> Tensor:
    """Returns a random float32 vector (size,), the same in every process."""
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def fingerprints(weights: Iterable[tuple[str, Tensor]]) -> dict[str, WeightFingerprint]:
    """Computes the fingerprints of the vectors and matrices among the named tensors; omits others."""
    found = {}
    for name, weight in weights:
        if weight.dim() == 2:
            found[name] = WeightFingerprint.of(
                weight.detach().float() @ random_input(weight.shape[1]).to(weight.device)
            )
        elif weight.dim() == 1:
            found[name] = WeightFingerprint.of(weight)
    return found


def differing_weights(
    sent: Mapping[str, WeightFingerprint], stored: Mapping[str, WeightFingerprint], relative: float
) -> list[str]:
    """Returns the names of weights whose fingerprints in an engine's layers (`stored`) differ from the
    trainer's (`sent`), in the order of sending. `relative`: the relative error that rounding explains."""
    return [
        name
        for name, ours in sent.items()
        if name in stored and not ours.distance(stored[name]) <= relative * ours.size
    ]


def explain_difference(unwritten: Sequence[str], different: Sequence[str], num_compared: int) -> str:
    """Returns a message about the cause of different log-probs. `unwritten`: parameters that no sync has
    written; `different`: weights that differ in the engine's layers, of `num_compared` weights that were read
    back."""
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
