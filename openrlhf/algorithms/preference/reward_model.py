import torch.nn.functional as F
from torch import Tensor


def pairwise_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Loss of a reward model on pairs, the Bradley-Terry model's.

    Training language models to follow instructions with human feedback,
    https://arxiv.org/abs/2203.02155, eq. 1; the margin: Llama 2, https://arxiv.org/abs/2307.09288, eq. 2

        l = -log sigmoid(chosen - rejected - margin)

    `chosen` and `rejected` are the scores (P,) of P pairs. Returns (P,). A softplus overflows for no scores.
    """
    return F.softplus(rejected - chosen + margin)
