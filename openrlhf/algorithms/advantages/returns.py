"""Rewards and returns of actions. `counts` (B,): number of actions of each sequence."""

from openrlhf.algorithms.tensor import Tensor

ROUNDING = 2.0**-20
"""Relative rounding error of returns, 16 times that of one float32 operation."""


def token_rewards(rewards: Tensor, kl: Tensor, counts: Tensor, kl_coef: float | Tensor) -> Tensor:
    """Returns the reward of each action, (A,): its KL penalty -kl_coef * `kl` (A,), plus the sequence's
    reward (B,) at the last action. `kl_coef`: a number, or one for each action, (A,)."""
    per_token = -kl_coef * kl
    acted = counts > 0
    per_token[counts.cumsum(0)[acted] - 1] += rewards[acted]
    return per_token


def discounted_returns(rewards: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """Returns G_t = r_t + gamma * G_{t+1} within each sequence, (A,), from `rewards` (A,)."""
    acted = counts[counts > 0]
    at_ends = rewards[acted.cumsum(0) - 1]
    if gamma == 1 and rewards.count_nonzero() == at_ends.count_nonzero():  # only last actions have a reward
        return at_ends.repeat_interleave(acted)
    returns = rewards.new_empty(rewards.shape)
    by_length = counts.argsort(descending=True)
    last = counts.cumsum(0)[by_length] - 1  # index of each sequence's last action
    num_running = counts.bincount().flip(0).cumsum(0).flip(0)[1:].tolist()
    running = rewards.new_zeros(len(counts))
    for steps_from_end, count in enumerate(num_running):
        index = last[:count] - steps_from_end
        running = rewards[index] + gamma * running[:count]
        returns[index] = running
    return returns


def generalized_advantages(
    rewards: Tensor, values: Tensor, counts: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns, both (A,), by the recursion of `gae.GAE`."""
    next_values = values.roll(-1)
    next_values[counts.cumsum(0)[counts > 0] - 1] = 0
    deltas = rewards + gamma * next_values - values
    advantages = discounted_returns(deltas, counts, gamma * lambd)
    return advantages, advantages + values


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Returns 1 - Var(G - V) / Var(G) of the critic's values V and the returns G, both (A,): 1 if values
    predict the returns exactly, 0 if a constant predicts them as well, negative if a constant is better. 0 if
    all returns are equal up to their rounding, which is relative to the values that they are sums of."""
    if len(returns) == 0:
        return 0.0
    variance = returns.double().var(correction=0)
    largest = max(float(values.abs().max()), float(returns.abs().max()))
    if variance <= (ROUNDING * largest) ** 2:
        return 0.0
    return float(1 - (returns - values).double().var(correction=0) / variance)
