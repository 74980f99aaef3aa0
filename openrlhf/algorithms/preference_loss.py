"""Losses of pairs and of unpaired preferences: reward models, DPO and its relatives, KTO.

h = (log p - log p_ref)(chosen) - (log p - log p_ref)(rejected), summed over the tokens of an answer.
"""

import torch.nn.functional as F
from torch import Tensor


def pairwise_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """(P,) scores -> (P,): -log sigmoid(chosen - rejected - margin), Bradley-Terry.

    Without a margin this is log(1 + exp(rejected - chosen)), which overflows nowhere when written so.
    """
    return F.softplus(rejected - chosen + margin)


def dpo_loss(h: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """(P,) -> (P,): -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h).

    e = `label_smoothing` > 0 is cDPO. https://arxiv.org/abs/2305.18290
    """
    return (1 - label_smoothing) * F.softplus(-beta * h) + label_smoothing * F.softplus(beta * h)


def ipo_loss(h: Tensor, *, beta: float) -> Tensor:
    """(P,) -> (P,): (h - 1 / (2 beta))^2. https://arxiv.org/abs/2310.12036, equation 17"""
    return (h - 1 / (2 * beta)) ** 2


def kto_loss(
    log_ratio: Tensor,
    desirable: Tensor,
    kl: float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """(B,) log p - log p_ref of each answer, (B,) bool -> (B,)

    desirable: w_D (1 - sigmoid(beta (log_ratio - kl))), undesirable:
    w_U (1 - sigmoid(beta (kl - log_ratio))); `kl` >= 0 is the batch's estimate of KL(policy || reference).
    https://arxiv.org/abs/2402.01306, equation 8
    """
    gain = beta * (log_ratio - kl)
    return (desirable_weight * F.sigmoid(-gain)).where(desirable, undesirable_weight * F.sigmoid(gain))
