import torch.nn.functional as F
from torch import Tensor


def pairwise_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Computes the Bradley-Terry loss of a reward model on pairs.

    Training language models to follow instructions with human feedback,
    https://arxiv.org/abs/2203.02155, eq. 1; the margin: Llama 2, https://arxiv.org/abs/2307.09288, eq. 2

        l = -log sigmoid(chosen - rejected - margin)

    `chosen` and `rejected` are the scores (P,) of P pairs. Returns (P,). The softplus form does not overflow.
    """
    return F.softplus(rejected - chosen + margin)
