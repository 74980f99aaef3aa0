"""Penalties and clipping of the rewards of samples. All functions map rewards (B,) to rewards (B,)."""

import torch
from torch import Tensor


def overlong_penalty(
    rewards: Tensor, num_actions: Tensor, *, max_new_tokens: int, buffer_len: float, factor: float
) -> Tensor:
    """Subtracts a penalty that grows linearly to `factor` over the last `buffer_len` tokens before the limit:
    DAPO's soft overlong punishment, https://arxiv.org/abs/2503.14476, eq. 13"""
    excess = (num_actions - (max_new_tokens - buffer_len)).clamp(0, buffer_len)
    return rewards - excess / buffer_len * factor


def stop_properly_penalty(rewards: Tensor, truncated: Tensor, *, coef: float) -> Tensor:
    """Scales the rewards of truncated samples by `coef` or, if `coef` is negative, replaces them by it.
    ProRL, https://arxiv.org/abs/2505.24864"""
    penalised = rewards * coef if coef >= 0 else torch.full_like(rewards, coef)
    return torch.where(truncated, penalised, rewards)


def clip(rewards: Tensor, low: float, high: float) -> Tensor:
    return rewards.clamp(low, high)
