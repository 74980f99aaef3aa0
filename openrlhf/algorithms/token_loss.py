"""Losses of supervised learning on single tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor


def negative_log_likelihood(log_probs: Tensor) -> Tensor:
    """(A,) log-probs -> (A,) losses."""
    return -log_probs


def label_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """(A, K) logits -> (A,) cross entropies.

    `labels`: (A,) int64, the correct classes; or (A,) float with K = 2, the probabilities of the first class.
    """
    if labels.is_floating_point():
        labels = torch.stack([labels, 1 - labels], dim=-1).to(logits.dtype)
    return F.cross_entropy(logits, labels, reduction="none")
