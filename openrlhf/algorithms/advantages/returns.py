"""Rewards and returns of single actions. `counts` (B,) has the number of actions of each sequence."""

from openrlhf.algorithms.tensor import Tensor


def token_rewards(rewards: Tensor, kl: Tensor, counts: Tensor, kl_coef: float) -> Tensor:
    """(B,) and (A,) -> (A,): the KL penalty of every action, plus the reward on each sequence's last one."""
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
    returns = rewards.new_empty(rewards.shape)
    by_length = counts.argsort(descending=True)
    last = counts.cumsum(0)[by_length] - 1  # index of each sequence's last action
    still_there = counts.bincount().flip(0).cumsum(0).flip(0)[1:].tolist()
    running = rewards.new_zeros(len(counts))
    for steps_from_end, count in enumerate(still_there):
        index = last[:count] - steps_from_end
        running = rewards[index] + gamma * running[:count]
        returns[index] = running
    return returns


def generalized_advantages(
    rewards: Tensor, values: Tensor, counts: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """(A,) -> advantages and returns, both (A,), see `gae.GAE`."""
    next_values = values.roll(-1)
    next_values[counts.cumsum(0)[counts > 0] - 1] = 0
    deltas = rewards + gamma * next_values - values
    advantages = discounted_returns(deltas, counts, gamma * lambd)
    return advantages, advantages + values


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """(A,) -> 1 - Var(G - V) / Var(G): 1 if values predict the returns, 0 if a constant does as well,
    negative if a constant does better. 0 if all returns are equal."""
    if len(returns) == 0 or (variance := returns.double().var(correction=0)) == 0:
        return 0.0
    return float(1 - (returns - values).double().var(correction=0) / variance)
