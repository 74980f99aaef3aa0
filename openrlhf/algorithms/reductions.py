"""Sums and means over actions, written once so that every loss divides by the same thing.

A reduction of a loss returns this row's contribution: those of all rows and ranks add up to the loss of the
optimizer step. `x` is (A,) and `counts` (B,) tells which actions belong to which sequence, as in `types.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from openrlhf.types import LossNorm


def token_mean(loss: Tensor, norm: LossNorm) -> Tensor:
    """(A,) -> (): this row's contribution to the mean over every action of the step."""
    return loss.sum() / max(norm.num_tokens, 1)


def sample_mean(loss: Tensor, counts: Tensor, norm: LossNorm) -> Tensor:
    """(A,) -> (): this row's contribution to the mean over sequences of each sequence's mean."""
    return segment_mean(loss, counts).sum() / max(norm.num_sequences, 1)


def constant_length_mean(loss: Tensor, norm: LossNorm, length: float) -> Tensor:
    """(A,) -> (): like `sample_mean`, but every sequence counts as `length` actions long, so that a token
    weighs the same in a short and in a long sequence. Dr. GRPO, https://arxiv.org/abs/2503.20783"""
    return loss.sum() / (max(norm.num_sequences, 1) * length)


@dataclass(frozen=True, slots=True)
class Aggregation:
    summary: str
    """What `--help` says of it."""
    of: Callable[[Tensor, Tensor, LossNorm, float], Tensor]
    """(loss (A,), counts (B,), norm, longest response) -> ()"""


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token_mean": Aggregation("over tokens", lambda loss, counts, norm, length: token_mean(loss, norm)),
    "sample_mean": Aggregation(
        "over samples, of each one's mean",
        lambda loss, counts, norm, length: sample_mean(loss, counts, norm),
    ),
    "constant_length": Aggregation(
        "over samples, of each one's sum / rollout.max_new_tokens (Dr. GRPO)",
        lambda loss, counts, norm, length: constant_length_mean(loss, norm, length),
    ),
}
"""By the names that `--actor.loss_aggregation` takes."""


def mean(x: Tensor) -> Tensor:
    """The mean, and 0 of nothing: a rollout whose samples are all masked must not log NaN."""
    return x.sum() / max(x.numel(), 1)


def whiten(x: Tensor, *, scale: bool = True) -> Tensor:
    """Zero mean and, with `scale`, unit variance."""
    centered = x - mean(x)
    return centered * mean(centered**2).clamp(min=1e-8).rsqrt() if scale else centered


def segment_sum(x: Tensor, counts: Tensor) -> Tensor:
    """(A,) -> (B,)"""
    return x.new_zeros(len(counts)).index_add(0, _segment_ids(counts, len(x)), x)


def segment_mean(x: Tensor, counts: Tensor) -> Tensor:
    """(A,) -> (B,), 0 for a sequence without actions."""
    return segment_sum(x, counts) / counts.clamp(min=1)


def spread(x: Tensor, counts: Tensor, num_actions: int) -> Tensor:
    """(B,) -> (A,): each sequence's value on each of its actions. `num_actions` is the sum of `counts`."""
    return x[_segment_ids(counts, num_actions)]


def _segment_ids(counts: Tensor, num_actions: int) -> Tensor:
    """(B,) -> (A,): the sequence of each action."""
    import torch

    # With output_size the device need not be asked for the sum.
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=num_actions)
