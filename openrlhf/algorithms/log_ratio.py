"""The log of the ratio between two policies, of tokens or of sequences."""

from torch import Tensor

from openrlhf.algorithms.reductions import segment_mean, spread

MAX_LOG_RATIO = 20.0
"""exp(20) is finite and far outside every clip range."""


def token_log_ratio(log_probs: Tensor, old_log_probs: Tensor, counts: Tensor) -> Tensor:
    """(A,) -> (A,): PPO's ratio, in logs."""
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, counts: Tensor) -> Tensor:
    """(A,) -> (A,): the mean log ratio of each sequence, on each of its actions.
    GSPO's ratio in logs, https://arxiv.org/abs/2507.18071, eq. 7"""
    means = segment_mean(log_probs - old_log_probs, counts)
    return spread(means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), counts, len(log_probs))


LOG_RATIOS = {"token": token_log_ratio, "sequence": sequence_log_ratio}
"""(log_probs (A,), old_log_probs (A,), counts (B,)) -> (A,)"""
