import torch.nn.functional as F
from torch import Tensor


def dpo_loss(h: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Direct preference optimization (DPO); conservative DPO (cDPO) with `label_smoothing`.

    Direct Preference Optimization: Your Language Model is Secretly a Reward Model,
    https://arxiv.org/abs/2305.18290, eq. 7. cDPO: https://ericmitchell.ai/cdpo.pdf

        l = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h),   e = label_smoothing
        h = (log p - log p_ref)(chosen) - (log p - log p_ref)(rejected)

    `h` (P,) sums log-probs over the tokens of an answer. Returns (P,).
    """
    return (1 - label_smoothing) * F.softplus(-beta * h) + label_smoothing * F.softplus(beta * h)
