"""Whether engines compute with the weights that they were sent.

A checksum shows what went into an engine's loader, not what the engine made of it: fused and packed copies,
tied heads, buffers. That shows in what it computes. The engines of a run start with random weights, so
whatever a sync leaves out makes their log-probs of a probe differ from the trainer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.models.vision import SHAPES, ImageReader
from openrlhf.types import Image

PROBE_TOKENS = 128
ROUNDING = {"fp32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of one rounding by `--ds.param_dtype`. GPUs may round the factors of float32
products to TF32."""
ROUNDINGS = 32
"""Errors that may add up. Independent ones grow with the square root: it is 32 with 256 layers, 4 in each."""
LEAST_SPREAD = 0.01
"""Nats. What a model that tells tokens apart by less is measured by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProbe:
    """What one engine says of a probe."""

    log_probs: list[float]
    """[L - 1] of every token but the first, at temperature 1."""
    unwritten: list[str]
    """Parameters that hold what they held before the first sync, of those that vLLM leaves visible."""


def probe_of(tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
    """At most `length` ordinary tokens drawn at random, the same ones at every call, after the tokenizer's
    first token where it has one."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = torch.tensor(sorted(set(tokenizer.get_vocab().values()) - special))
    drawn = torch.randint(len(ordinary), (length,), generator=torch.Generator().manual_seed(0))
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*first, *ordinary[drawn].tolist()][:length]


@dataclass(frozen=True, slots=True)
class ProbePicture:
    """What stands in front of the tokens of a probe, for a policy that reads images."""

    placeholder: tuple[int, ...] = ()
    """As an engine is asked."""
    read: tuple[int, ...] = ()
    """All tokens that it reads of it."""
    images: tuple[Image, ...] = ()


def probe_picture(reader: ImageReader) -> ProbePicture:
    """The same one at every call."""
    processor, picture = reader.processor, reader.noise(SHAPES[0])
    placeholder = processor.tokenizer(processor.image_token, add_special_tokens=False)["input_ids"]
    return ProbePicture(tuple(placeholder), tuple(picture.token_ids.tolist()), picture.images)


def check_stored(trainer: Tensor, engines: Sequence[EngineProbe], dtype: str) -> None:
    """Raise RuntimeError where an engine's log-probs differ from the trainer's, (L - 1,), by more than the
    arithmetic of `dtype` explains.

    Errors of logits grow with the logits, so they are measured in units of the trainer's spread: the mean of
    |log p - mean log p|. Those of wrong weights are about 1.
    """
    spread = float((trainer - trainer.mean()).abs().mean())
    allowed = ROUNDINGS * ROUNDING[dtype] * max(spread, LEAST_SPREAD)
    for i, engine in enumerate(engines):
        difference = (torch.tensor(engine.log_probs) - trainer).abs()
        if not difference.mean() <= allowed:  # nor is NaN
            raise RuntimeError(
                f"inference engine {i} does not compute with the weights that the trainer sent: their "
                f"log-probs of {len(trainer)} tokens differ by {difference.mean():.3g} nats on average, "
                f"{difference.max():.3g} at most; {dtype} explains {allowed:.3g}.\n{_reason(engine)}"
            )


def _reason(engine: EngineProbe) -> str:
    if engine.unwritten:
        more = len(engine.unwritten) - 3
        names = ", ".join(engine.unwritten[:3]) + (f" and {more} more" if more > 0 else "")
        return f"The sync did not write {names}: nothing was sent for it, or vLLM passed over it."
    return (
        "vLLM keeps a copy of some weights that the sync did not renew, or computes this architecture in "
        "another way than transformers does.\nWhat it samples is not the policy's, so training would go "
        "wrong. Try another --ds.attn_implementation, or other versions of transformers and vLLM."
    )
