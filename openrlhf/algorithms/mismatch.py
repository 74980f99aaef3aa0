"""Measures the mismatch between the log-probs of sampler and trainer.

Sampler and trainer compute the log-probs of the same actions. If their weights are equal, the results differ
by rounding alone. `r` is an action's probability ratio policy / sampler.
"""

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.reductions import BLOCK, blockwise, mean, segment_mean, spread
from openrlhf.types import Metrics


def mismatch_metrics(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    staleness: Tensor | None = None,
    counts: Tensor | None = None,
) -> Metrics:
    """Compares the log-probs of the policy before the update with the sampler's, both (A,). If both have the
    same weights, the metrics are numerical noise.

    `mismatch/kl` estimates KL(sampler || policy) by the mean of r - 1 - log r. `mismatch/ess` is the
    effective sample size of the weights r as a fraction, (sum r)^2 / (A sum r^2): 1 if all weights are equal,
    near 0 if few actions dominate the update. `abs_diff_*` are statistics of |log r| in nats; `p99` is
    exceeded by at most 1 % of the actions.

    With `staleness` (A,) and `counts` (B,), the number of actions of each sequence, `kl`, `abs_diff_mean` and
    `ess` are also reported for each staleness, and `fresh_abs_diff_*` for fresh sequences, all of whose
    actions were sampled with the current weights.
    """
    log_ratio = blockwise(lambda x, y: (x - y).clamp(-20, 20), log_probs, rollout_log_probs)
    distance = log_ratio.abs()
    of_all = _mismatch(log_ratio, distance) | _abs_diff(distance)
    metrics = {f"mismatch/{name}": value for name, value in of_all.items()}
    if staleness is None:
        return metrics
    ages = staleness.clamp(max=MAX_AGE)
    present = ages.unique().tolist()
    for age in present if len(present) > 1 else ():
        suffix = f"{age}_or_more" if age == MAX_AGE else str(age)
        of_age = _mismatch(log_ratio[ages == age], distance[ages == age])
        metrics |= {f"mismatch/{name}_staleness_{suffix}": value for name, value in of_age.items()}
    counts = torch.ones_like(staleness) if counts is None else counts
    is_fresh = spread(segment_mean(staleness.double(), counts) == 0, counts, len(log_ratio))
    if is_fresh.any():
        metrics |= {f"mismatch/fresh_{name}": value for name, value in _abs_diff(distance[is_fresh]).items()}
    return metrics


GAPS = ("abs_diff_mean", "abs_diff_p99", "abs_diff_max")
"""Statistics of |log r|, in nats."""


MAX_AGE = 3
"""Actions of at least this staleness share one metric."""


def _mismatch(log_ratio: Tensor, distance: Tensor) -> Metrics:
    kl = total = squares = 0.0
    for part in log_ratio.split(BLOCK):  # see `blockwise`
        ratio = part.exp()
        kl += float((ratio - 1 - part).sum())
        weights = ratio.double()
        total += float(weights.sum())
        squares += float(weights @ weights)
    count = len(log_ratio)
    return {
        "kl": kl / max(count, 1),
        "abs_diff_mean": float(mean(distance)),
        "ess": total**2 / (count * squares) if count else 1.0,
    }


def _abs_diff(distance: Tensor) -> dict[str, float]:
    largest = float(distance.max()) if len(distance) else 0.0
    return dict(zip(GAPS, (float(mean(distance)), _percentile(distance, 99), largest), strict=True))


def _percentile(x: Tensor, percent: int) -> float:
    """Returns the smallest value that at least `percent` % of the values do not exceed; 0 for an empty
    tensor."""
    rank = -(-len(x) * percent // 100) - 1
    # torch.quantile accepts at most 2^24 values, and torch.kthvalue takes six times as long
    return float(np.partition(x.numpy(), rank)[rank]) if len(x) else 0.0


PROBE = "mismatch/probe_mean"
"""Metric of a weight sync: mean difference between the engine's and the trainer's log-probs of the probe, in
units of their spread; maximum over the engines."""
MERGED = "mismatch/merged_fraction"
"""Metric of a weight sync: fraction of the adapters' change that rounding leaves in the engines' weights."""
