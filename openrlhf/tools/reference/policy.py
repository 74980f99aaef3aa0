"""The losses of policy and critic in RL, one sequence at a time in float64."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from openrlhf.api import AdvantageConfig, ExperienceRow, KLConfig, LossNorm, PPOConfig, not_none

LARGEST = 20.0
"""Bound of log ratios."""
KL: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: (-d).exp() - 1 + d,
}
"""Estimator -> estimate of the KL of each action, as a function of its log ratio."""
LOSSES, CORRECTIONS = ("ppo", "gspo", "cispo"), ("tis", "icepop", "seq-mask-tis")
ANCHORS = ("recomputed", "rollout", "interpolated")


def plain_kl(log_ratio: Tensor, estimator: str) -> Tensor:
    """Returns the estimate of the KL of each action, within [-10, 10]."""
    return KL[estimator](log_ratio.clamp(-LARGEST, LARGEST)).clamp(-10, 10)


def is_covered(config: PPOConfig) -> bool:
    """Returns False for losses, corrections and anchors of the user."""
    advantage = config.algo.advantage
    names = (config.actor.policy_loss_type, advantage.is_correction_type, advantage.proximal_policy)
    return all(name in known for name, known in zip(names, (LOSSES, CORRECTIONS, ANCHORS), strict=True))


def plain_policy_loss(
    config: PPOConfig,
    row: ExperienceRow,
    norm: LossNorm,
    log_probs: Tensor,
    entropy: Tensor | None,
    kl_coef: float,
    likely: Tensor | None = None,
) -> Tensor:
    """Returns the loss of a row, (), given the policy's `log_probs` and `entropy`, (A,) float64, and its
    log-probs of the sampler's likely tokens, (A, K); see `is_covered`."""
    actor, total = config.actor, log_probs.new_zeros(())
    default = "sample_mean" if actor.policy_loss_type == "gspo" else "token_mean"
    ends = np.cumsum(row.row.num_actions.tolist()).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        if start == end:
            continue
        divisor = {
            "token_mean": max(norm.num_tokens, 1),
            "sample_mean": (end - start) * max(norm.num_sequences, 1),
            "prompt_mean": _prompt_divisor(row, norm, start),
            "constant_length": max(norm.num_sequences, 1) * config.longest_response,
        }[actor.loss_aggregation or default]
        part = slice(start, end)
        losses = _sequence_loss(
            config, row, part, log_probs[part], kl_coef, None if likely is None else likely[part]
        )
        if actor.entropy_coef:
            losses = losses - actor.entropy_coef * not_none(entropy)[part]
        total = total + losses.sum() / divisor
    return total


def _prompt_divisor(row: ExperienceRow, norm: LossNorm, action: int) -> float:
    """Returns the number of prompts times that of the actions after an action's prompt; 1 if unknown."""
    if row.prompts is None or norm.prompt_tokens is None:
        return 1
    return float(norm.prompt_tokens[row.prompts[action]]) * int((norm.prompt_tokens > 0).sum())


def _sequence_loss(
    config: PPOConfig, row: ExperienceRow, part: slice, now: Tensor, kl_coef: float, likely: Tensor | None
) -> Tensor:
    """Returns the loss of each action of a sequence, (n,), without the entropy."""
    actor, algo, advantage = config.actor, config.algo, config.algo.advantage
    sampler, advantages = row.rollout_log_probs[part].double(), row.advantages[part].double()
    old = now.detach() if row.old_log_probs is None else row.old_log_probs[part].double()
    ages = torch.zeros_like(now) if row.staleness is None else row.staleness[part].double()
    share = 1 / ages.clamp(min=1)
    anchor = {
        "recomputed": old,
        "rollout": sampler,
        "interpolated": share * sampler + (1 - share) * now.detach(),
    }[advantage.proximal_policy]
    moved, gap = now - anchor, anchor - sampler
    if actor.policy_loss_type == "gspo":
        moved, gap, ages = (x.mean().expand(len(x)) for x in (moved, gap, ages))
    moved, gap = moved.clamp(-LARGEST, LARGEST), gap.clamp(-LARGEST, LARGEST)
    below, above = actor.eps_clip_low_high or (actor.eps_clip, actor.eps_clip)
    ratio, low, high = moved.exp(), 1 - below, 1 + above
    if actor.policy_loss_type == "cispo":
        losses = -ratio.detach().clamp(low, high) * advantages * now
    else:
        losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        if actor.dual_clip is not None:
            bounded = torch.minimum(losses, -actor.dual_clip * advantages)
            losses = torch.where(advantages < 0, bounded, losses)
    if advantage.is_correction_level != "off":
        losses = losses * _gated(advantage, gap, anchor, sampler)
    elif advantage.is_correction_enable:
        losses = losses * _correction(advantage, gap)
    if advantage.score_centering_top_k:
        losses = losses + advantages * _expected_score(advantage, row, part, not_none(likely))
    if row.staleness is not None:
        oldest = advantage.max_token_staleness
        too_old = ages > (np.inf if oldest is None else oldest)
        losses = losses * torch.where(too_old, 0.0, advantage.staleness_decay**ages)
    if algo.kl.use_loss and kl_coef > 0:
        losses = losses + kl_coef * _kl(algo.kl, row, part, now, anchor)
    return losses


def _expected_score(advantage: AdvantageConfig, row: ExperienceRow, part: slice, likely: Tensor) -> Tensor:
    """Returns numbers (n,) whose gradient is the sampler's mean of the weighted scores at each action. Beyond
    the likely tokens the sampler has the policy's distribution, times a constant."""
    sampler, now = not_none(row.likely_log_probs)[part].double(), likely.detach()
    masses = row.row.log_masses
    whole = torch.ones(len(now)).to(now) if masses is None else masses[part].double().exp()
    others = (whole - sampler.exp().sum(1)).clamp(min=0) / (whole - now.exp().sum(1)).clamp(min=1e-6)

    def weights(gap: Tensor) -> Tensor:
        gap = gap.clamp(-LARGEST, LARGEST)
        if advantage.is_correction_level != "off":
            return _gated(advantage, gap, gap, gap)  # by the ratio alone
        return _correction(advantage, gap) if advantage.is_correction_enable else torch.ones_like(gap)

    mean = (sampler.exp() * weights(now - sampler) * likely).sum(1)
    return mean - others * weights(-others.log()) * (now.exp() * likely).sum(1)


def _kl(kl: KLConfig, row: ExperienceRow, part: slice, now: Tensor, anchor: Tensor) -> Tensor:
    if kl.ref == "rollout":
        return plain_kl(row.rollout_log_probs[part].double() - now, kl.estimator)
    log_ratio = now - not_none(row.ref_log_probs)[part]
    value = plain_kl(log_ratio, kl.estimator)
    if not kl.unbiased_gradient:
        return value
    old = anchor if row.old_log_probs is None else row.old_log_probs[part].double()
    weight = (now.detach() - old).exp().clamp(max=10) * log_ratio.detach().clamp(-LARGEST, LARGEST)
    return value.detach() + weight * (now - now.detach())


def _gated(advantage: AdvantageConfig, gap: Tensor, anchor: Tensor, sampler: Tensor) -> Tensor:
    """Returns the weight of each action of a sequence, (n,), by the flags of `is_correction_level`."""
    weights, (low, high) = gap.exp(), advantage.correction_bounds
    if advantage.is_correction_mode == "clip":
        return weights.clamp(low, high)
    p, q, smallest = sampler.exp(), anchor.exp(), 1e-12
    others = [(-x.expm1()).clamp(min=smallest).log() for x in (sampler, anchor)]
    statistic = {
        "ratio": gap,
        "tv": (p - q).abs(),
        "binary_kl": p * (sampler - anchor) - sampler.expm1() * (others[0] - others[1]),
    }[advantage.is_correction_gating]
    if advantage.is_correction_level == "seq":
        statistic = statistic.mean()
    if advantage.is_correction_gating == "ratio":
        statistic = statistic.exp()
    return torch.where((low <= statistic) & (statistic <= high), weights, 0.0)


def _correction(advantage: AdvantageConfig, gap: Tensor) -> Tensor:
    weights, (low, high) = gap.exp(), advantage.correction_bounds
    if advantage.is_correction_type == "icepop":
        return torch.where((weights < low) | (weights > high), 0.0, weights)
    lowest, highest = advantage.is_correction_sequence_threshold or (low, high)
    is_kept = advantage.is_correction_type == "tis" or lowest <= float(gap.mean().exp()) <= highest
    return weights.clamp(low, high) * is_kept


def plain_value_loss(config: PPOConfig, row: ExperienceRow, norm: LossNorm, values: Tensor) -> Tensor:
    """Returns the critic's loss of a row, (), given its `values`, (A,) float64."""
    before, returns, clip = not_none(row.values).double(), row.returns.double(), config.critic.value_clip
    near = torch.maximum(torch.minimum(values, before + clip), before - clip)
    losses = torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
    return losses.sum() / max(norm.num_tokens, 1)
