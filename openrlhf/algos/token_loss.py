"""Losses of supervised learning on single tokens."""

from torch import Tensor


def negative_log_likelihood(log_probs: Tensor) -> Tensor:
    """(A,) -> (A,)"""
    return -log_probs
