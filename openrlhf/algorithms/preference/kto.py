import torch.nn.functional as F
from torch import Tensor


def kto_loss(
    log_ratio: Tensor,
    desirable: Tensor,
    kl: float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimization (KTO) of unpaired answers.

    KTO: Model Alignment as Prospect Theoretic Optimization, https://arxiv.org/abs/2402.01306, eq. 8

        desirable    l = w_D (1 - sigmoid(beta (log_ratio - kl)))
        undesirable  l = w_U (1 - sigmoid(beta (kl - log_ratio)))

    `log_ratio` (B,) is log p - log p_ref of each answer, `desirable` (B,) bool, and `kl` >= 0 the batch's
    estimate of KL(policy || reference). Returns (B,).
    """
    gain = beta * (log_ratio - kl)
    return (desirable_weight * F.sigmoid(-gain)).where(desirable, undesirable_weight * F.sigmoid(gain))
