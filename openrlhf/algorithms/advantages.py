"""From one reward per sample to one advantage per action.

Groups are told apart by `group_ids` (B,), any integers: samples of one prompt share one. A group may be
smaller than was asked for, because failed samples are not in it, and its samples need not be neighbours.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) -> (B,): each reward minus the mean of the others in its group, 0 without others.
    RLOO, https://arxiv.org/abs/2402.14740"""
    totals, sizes = _groups(rewards, group_ids)
    baseline = (totals - rewards) / (sizes - 1).clamp(min=1)
    return torch.where(sizes > 1, rewards - baseline, 0).to(rewards.dtype)


def center(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) -> (B,): each reward minus its group's mean, 0 for a group of one."""
    return _center(rewards, group_ids).to(rewards.dtype)


def standardize(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) -> (B,): centered and divided by the group's standard deviation, 0 for a group of one.
    GRPO, https://arxiv.org/abs/2402.03300"""
    return (_center(rewards, group_ids) / (group_std(rewards, group_ids) + 1e-9)).to(rewards.dtype)


COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rloo": leave_one_out,
    "reinforce_baseline": center,
    "group_norm": standardize,
    "dr_grpo": center,
}
"""(rewards (B,), group_ids (B,)) -> (B,), of the estimators that compare the samples of a prompt."""


def without_peers(group_ids: Tensor) -> Tensor:
    """(B,) -> (B,) bool: samples alone in their group. There is nothing to compare them with."""
    return _groups(torch.zeros(len(group_ids)), group_ids)[1] == 1


def group_std(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) -> (B,) float64: the unbiased standard deviation of each sample's group, 0 for a group of one."""
    squares, sizes = _groups(_center(rewards, group_ids) ** 2, group_ids)
    return (squares / (sizes - 1).clamp(min=1)).sqrt()


def token_rewards(rewards: Tensor, kl: Tensor, counts: Tensor, kl_coef: float) -> Tensor:
    """(B,) and (A,) -> (A,): the KL penalty on every action, the reward on each sample's last one."""
    per_token = -kl_coef * kl
    acted = counts > 0
    per_token[counts.cumsum(0)[acted] - 1] += rewards[acted]
    return per_token


def discounted_returns(rewards: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """(A,) -> (A,): G_t = r_t + gamma * G_{t+1} within each sequence."""
    acted = counts[counts > 0]
    at_ends = rewards[acted.cumsum(0) - 1]
    if gamma == 1 and rewards.count_nonzero() == at_ends.count_nonzero():  # only whole sequences are rewarded
        return at_ends.repeat_interleave(acted)
    returns = torch.empty_like(rewards)
    by_length = counts.argsort(descending=True)
    last = counts.cumsum(0)[by_length] - 1  # the action that each sequence has come to, from its end
    still_there = torch.bincount(counts).flip(0).cumsum(0).flip(0)[1:].tolist()
    running = rewards.new_zeros(len(counts))
    for steps_from_end, count in enumerate(still_there):
        index = last[:count] - steps_from_end
        running = rewards[index] + gamma * running[:count]
        returns[index] = running
    return returns


def gae(rewards: Tensor, values: Tensor, counts: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """(A,) -> advantages and returns, both (A,). An action bootstraps from the next action of its sequence,
    also across environment feedback. https://arxiv.org/abs/1506.02438

    delta_t = r_t + gamma * V_{t+1} - V_t,   A_t = delta_t + gamma * lambda * A_{t+1},   G_t = A_t + V_t
    """
    next_values = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    next_values[counts.cumsum(0)[counts > 0] - 1] = 0
    deltas = rewards + gamma * next_values - values
    advantages = discounted_returns(deltas, counts, gamma * lambd)
    return advantages, advantages + values


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """(A,) -> 1 - Var(G - V) / Var(G): 1 where values predict the returns, 0 where a constant does as well,
    negative where it does better. 0 for returns that are all the same."""
    if len(returns) == 0 or (variance := returns.double().var(correction=0)) == 0:
        return 0.0
    return float(1 - (returns - values).double().var(correction=0) / variance)


def _center(rewards: Tensor, group_ids: Tensor) -> Tensor:
    totals, sizes = _groups(rewards, group_ids)
    return rewards - totals / sizes


def _groups(x: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) -> for each sample, the sum over its group and the size of its group.

    In float64: rounding a float32 mean of equal rewards would leave differences that `standardize` blows up.
    """
    _, index, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    totals = torch.zeros(len(sizes), dtype=torch.float64, device=x.device).index_add(0, index, x.double())
    return totals[index], sizes[index]
