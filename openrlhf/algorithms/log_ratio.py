"""Log of the probability ratio between two policies, per token or per sequence."""

from torch import Tensor

from openrlhf.algorithms.reductions import segment_mean, spread

MAX_LOG_RATIO = 20.0
"""Bound to which log ratios are clamped: exp(20) is finite and far outside every clip range."""


def token_log_ratio(log_probs: Tensor, old_log_probs: Tensor, counts: Tensor) -> Tensor:
    """Returns log(pi / pi_old) of each action, (A,), clamped to [-20, 20]: the log of PPO's ratio."""
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, counts: Tensor) -> Tensor:
    """Returns, for each action, the mean log ratio of its sequence, (A,), clamped to [-20, 20]: the log of
    GSPO's ratio, https://arxiv.org/abs/2507.18071, eq. 7. `counts` (B,): number of actions of each
    sequence."""
    means = segment_mean(log_probs - old_log_probs, counts)
    return spread(means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), counts, len(log_probs))


LOG_RATIOS = {"token": token_log_ratio, "sequence": sequence_log_ratio}
"""Functions (log_probs (A,), old_log_probs (A,), counts (B,)) -> log ratios (A,), by name."""
