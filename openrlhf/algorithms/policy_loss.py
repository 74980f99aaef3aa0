"""Losses of the policy, with the probability ratio of a token or of a sequence.

A surrogate returns the loss and where its lower and its upper bound were active (bool), all (A,).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from openrlhf.algorithms.reductions import segment_mean, spread

MAX_LOG_RATIO = 20.0
"""exp(20) is finite and far outside every clip range."""


def token_log_ratio(log_probs: Tensor, old_log_probs: Tensor, counts: Tensor) -> Tensor:
    """(A,) -> (A,): PPO's ratio, in logs."""
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, counts: Tensor) -> Tensor:
    """(A,) -> (A,): the mean log ratio of each sequence, on each of its actions.
    GSPO's ratio in logs, https://arxiv.org/abs/2507.18071, eq. 7"""
    means = segment_mean(log_probs - old_log_probs, counts)
    return spread(means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), counts, len(log_probs))


LOG_RATIOS = {"token": token_log_ratio, "sequence": sequence_log_ratio}
"""(log_probs (A,), old_log_probs (A,), counts (B,)) -> (A,)"""


def clipped_loss(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's surrogate, https://arxiv.org/abs/1707.06347, eq. 7

    l_t = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    A bound is active where the clipped term is the smaller one: the lower one where A < 0, the upper one
    where A > 0. `dual_clip` > 1 bounds the loss where A < 0 by -dual_clip * A
    (https://arxiv.org/abs/1912.09729, eq. 5).
    """
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.min(unclipped, clipped)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.max(objective, dual_clip * advantages), objective)
    active = clipped < unclipped
    return -objective, active & (advantages < 0), active & (advantages > 0)


def cispo_loss(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """CISPO, https://arxiv.org/abs/2506.13585, eq. 4 and 5: the ratio is a bounded weight without a gradient,
    so no action loses its own.

    l_t = -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log pi

    A bound is active where the ratio is beyond it, whatever the advantage. There is no dual clip: the weight
    is bounded already.
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * log_probs, ratio < weight, ratio > weight


SURROGATES: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "ppo": clipped_loss,
    "gspo": clipped_loss,
    "cispo": cispo_loss,
}
"""(log_probs, log_ratio, advantages, clip_low=, clip_high=, dual_clip=) -> loss and active bounds"""
