"""Losses of labels, one per action."""

import torch
import torch.nn.functional as F
from torch import Tensor


def label_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross entropies (A,) of logits (A, K) of K classes.

    `labels`: (A,) int64, the correct classes; or (A,) float with K = 2, the probabilities of the first class.
    """
    if labels.is_floating_point():
        labels = torch.stack([labels, 1 - labels], dim=-1).to(logits.dtype)
    return F.cross_entropy(logits, labels, reduction="none")
