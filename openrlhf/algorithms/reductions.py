"""Sums and means over actions, shared by all losses so that all divide by the same totals.

A reduction returns a row's contribution to the loss; the contributions of all rows and ranks add up to the
loss of the optimizer step. `x` is (A,), and `counts` (B,) has the number of actions of each sequence, as in
`types.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from openrlhf.rows import LossNorm


def token_mean(loss: Tensor, norm: LossNorm) -> Tensor:
    """Returns this row's contribution, (), to the mean of `loss` (A,) over all actions of the optimizer
    step."""
    return loss.sum() / max(norm.num_tokens, 1)


def sample_mean(loss: Tensor, counts: Tensor, norm: LossNorm) -> Tensor:
    """Returns this row's contribution, (), to the mean over sequences of each sequence's mean of `loss`
    (A,)."""
    return segment_mean(loss, counts).sum() / max(norm.num_sequences, 1)


def constant_length_mean(loss: Tensor, norm: LossNorm, length: float) -> Tensor:
    """Like `sample_mean`, but divides the sum over each sequence by the constant `length`, so that a token
    weighs the same in a short and in a long sequence. Dr. GRPO, https://arxiv.org/abs/2503.20783"""
    return loss.sum() / (max(norm.num_sequences, 1) * length)


def prompt_mean(loss: Tensor, prompts: Tensor, norm: LossNorm) -> Tensor:
    """Returns this row's contribution, (), to the mean over prompts of the mean of `loss` (A,) over all
    actions after a prompt, those of all its samples in the optimizer step. `prompts` (A,): the number of each
    action's prompt. The Art of Scaling Reinforcement Learning Compute for LLMs,
    https://arxiv.org/abs/2510.13786"""
    totals = norm.prompt_tokens
    assert totals is not None, "the rows of an optimizer step have the numbers of their prompts"
    return (loss / totals[prompts]).sum() / totals.count_nonzero().clamp(min=1)


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A way to reduce the losses of actions to the loss of a row."""

    summary: str
    """Description in `--help`."""
    of: Callable[[Tensor, Tensor, LossNorm, float], Tensor]
    """(loss (A,), counts (B,) or with `by_prompt` prompts (A,), norm, longest response) -> ()"""
    by_prompt: bool = False
    """Whether it reads the prompts of actions."""


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token_mean": Aggregation("over tokens", lambda loss, counts, norm, length: token_mean(loss, norm)),
    "sample_mean": Aggregation(
        "mean over samples of each sample's mean over tokens",
        lambda loss, counts, norm, length: sample_mean(loss, counts, norm),
    ),
    "prompt_mean": Aggregation(
        "mean over prompts of the mean over all tokens of a prompt's samples",
        lambda loss, prompts, norm, length: prompt_mean(loss, prompts, norm),
        by_prompt=True,
    ),
    "constant_length": Aggregation(
        "mean over samples of each sample's sum over tokens / rollout.max_new_tokens (Dr. GRPO)",
        lambda loss, counts, norm, length: constant_length_mean(loss, norm, length),
    ),
}
"""Aggregations by their names in `--actor.loss_aggregation`."""


BLOCK = 1 << 15
"""Numbers in a block of `blockwise`: with its intermediate results it fits a core's cache."""


def blockwise(of: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """Returns the elementwise function `of` columns, all (A,). Of long columns it computes one block after
    the other: an expression on whole columns would write each intermediate result to memory."""
    blocks = zip(*(x.split(BLOCK) for x in columns), strict=True)
    first = of(*next(blocks))
    whole = first.new_empty(len(columns[0]))
    begin, *rest = whole.split(BLOCK)
    begin.copy_(first)
    for part, block in zip(rest, blocks, strict=True):
        part.copy_(of(*block))
    return whole


def mean(x: Tensor) -> Tensor:
    """Returns the mean; 0 for an empty tensor, so that a step without actions does not log NaN."""
    return x.sum() / max(x.numel(), 1)


def whiten(x: Tensor, *, scale: bool = True) -> Tensor:
    """Shifts `x` to zero mean and, with `scale`, scales it to unit variance. The mean is float64, because
    the float32 mean of equal numbers may differ from them by a rounding error."""
    centered = x - mean(x.double())
    return centered * mean(centered**2).clamp(min=1e-8).rsqrt() if scale else centered


def segment_sum(x: Tensor, counts: Tensor) -> Tensor:
    """Sums `x` (A,) over each sequence, (B,)."""
    return x.new_zeros(len(counts)).index_add(0, _segment_ids(counts, len(x)), x)


def segment_mean(x: Tensor, counts: Tensor) -> Tensor:
    """Averages `x` (A,) over each sequence, (B,); 0 for a sequence without actions."""
    return segment_sum(x, counts) / counts.clamp(min=1)


def spread(x: Tensor, counts: Tensor, num_actions: int) -> Tensor:
    """Repeats the value `x` (B,) of each sequence for each of its actions, (A,). `num_actions`: the sum of
    `counts`."""
    return x[_segment_ids(counts, num_actions)]


def _segment_ids(counts: Tensor, num_actions: int) -> Tensor:
    """Returns the index of each action's sequence, (A,)."""
    ids = counts.new_ones(len(counts)).cumsum(0) - 1
    return ids.repeat_interleave(counts, output_size=num_actions)  # without it, the CPU waits for their sum
