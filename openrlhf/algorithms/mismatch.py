"""Measures the mismatch between the log-probs of sampler and trainer, and decides whether rounding can
explain it.

Sampler and trainer compute the log-probs of the same actions. If their weights are equal, the results differ
by rounding alone. `r` is an action's probability ratio policy / sampler.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.reductions import blockwise, mean, segment_mean, spread
from openrlhf.errors import ErrorCode, RunError
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


def fresh_mismatch(metrics: Metrics) -> dict[str, float]:
    """Returns the statistics `GAPS` of fresh samples, by metric name. Empty if the step has no fresh samples
    or the policy's log-probs were not computed."""
    names = [f"mismatch/fresh_{name}" for name in GAPS]
    if names[0] not in metrics and metrics.get("rollout/staleness_max") == 0:
        names = [f"mismatch/{name}" for name in GAPS]
    return {name: metrics[name] for name in names if name in metrics}


MAX_AGE = 3
"""Actions of at least this staleness share one metric."""


def _mismatch(log_ratio: Tensor, distance: Tensor) -> Metrics:
    return {
        "kl": float(mean(blockwise(lambda d: d.exp() - 1 - d, log_ratio))),
        "abs_diff_mean": float(mean(distance)),
        "ess": _effective_fraction(blockwise(lambda d: d.double().exp(), log_ratio)),
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


def _effective_fraction(weights: Tensor) -> float:
    """Returns the effective sample size as a fraction of the samples; 1 for an empty tensor. Overwrites the
    weights."""
    total = weights.sum()
    return float(total**2 / (len(weights) * weights.square_().sum())) if len(weights) else 1.0


PROBE = "mismatch/probe_mean"
"""Metric of a weight sync: mean difference between the engine's and the trainer's log-probs of the probe, in
units of their spread; maximum over the engines."""
MERGED = "mismatch/merged_fraction"
"""Metric of a weight sync: fraction of the adapters' change that rounding leaves in the engines' weights."""
STOP_ABOVE = {"fp32": 0.04, "fp16": 0.04, "bf16": 0.3}
"""Means of |log r| in nats above which a run stops, by `--ds.param_dtype`: about 80 relative rounding errors
of 2^-11 (also for fp32, since GPUs may round the factors of products to TF32) or of 2^-8. A mixture of
experts in bfloat16 measures about 0.02."""
WARN_ABOVE = {"fp32": 0.005, "fp16": 0.01, "bf16": 0.05}
"""Means of |log r| in nats above which a run always warns."""
NEVER_WARN_BELOW = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""Means of |log r| in nats below which a run never warns."""
LIMIT_FACTORS = {"mean": 1.0, "p99": 10.0, "max": 100.0}
"""Limit of each statistic as a multiple of the limit of the mean."""
NUM_FIRST = 3
"""Number of initial values of a statistic with which later values are compared."""
GROWTH = 5.0
"""A run warns if a value exceeds this multiple of the largest initial value."""


def check_mismatch(metrics: Metrics, dtype: str, limit: float | None, step: int) -> None:
    """Raises RunError if the mean or the 99th percentile of |log r| of fresh samples exceeds its limit, up to
    which rounding explains it. The maximum is not checked: rounding may make a router choose another expert
    for a single action.

    `dtype`: fp32, fp16 or bf16. `limit`: largest mean of |log r| in nats; None: the default `STOP_ABOVE`.
    """
    most = STOP_ABOVE[dtype] if limit is None else limit
    for name, value in fresh_mismatch(metrics).items():
        allowed = most * _limit_factor(name)
        if not name.endswith("_max") and not value <= allowed:  # true for NaN, too
            text = (
                f"step {step}: {name} is {value:.3g} nats on samples of the current weights, and rounding in "
                f"{dtype} explains at most {allowed:.3g}: the samples are from another distribution than the "
                "policy's.\nCompare the weights, chat template, precision and sampling parameters of sampler "
                "and trainer; the step's samples are in the run folder's rollouts.\n--algo.max_mismatch sets "
                "another limit on the mean; inf turns the check off."
            )
            raise RunError(ErrorCode.WRONG_WEIGHTS, text)


@dataclass(kw_only=True)
class MismatchWatch:
    """Finds statistics of fresh samples and of the weight sync's probe that are much larger than in a run's
    first steps, or than rounding explains."""

    dtype: str
    """Dtype of the weights: fp32, fp16 or bf16."""
    first: dict[str, list[float]] = field(default_factory=dict, init=False)
    """The first values of each statistic."""
    reported: set[str] = field(default_factory=set, init=False)
    """Statistics that were reported and are still above their limits."""

    def check(self, metrics: Metrics) -> list[str]:
        """Returns a message for each statistic that newly exceeds its limit in this step."""
        mismatch = fresh_mismatch(metrics) | ({PROBE: metrics[PROBE]} if PROBE in metrics else {})
        above = {name for name, value in mismatch.items() if not value <= self._limit(name)}
        messages = [self._message(name, mismatch[name]) for name in sorted(above - self.reported)]
        self.reported = (self.reported - mismatch.keys()) | above
        for name, value in mismatch.items():
            if len(values := self.first.setdefault(name, [])) < NUM_FIRST:
                values.append(value)
        return messages

    def _limit(self, name: str) -> float:
        values, most = self.first.get(name, []), WARN_ABOVE[self.dtype] * _limit_factor(name)
        if len(values) < NUM_FIRST:
            return most
        return min(most, max(GROWTH * max(values), NEVER_WARN_BELOW[self.dtype] * _limit_factor(name)))

    def _message(self, name: str, value: float) -> str:
        values = self.first.get(name, [])
        usual = f"; at most {max(values):.3g} in the first steps" if len(values) == NUM_FIRST else ""
        return (
            f"{name} > {self._limit(name):.2g} (now {value:.3g}{usual}): sampler and trainer differ by more "
            "than in the first steps, or than rounding explains. Look for a different precision, kernel or "
            "chat template, or for weights that the weight sync leaves out; with experts, set "
            "--algo.router_replay."
        )


def _limit_factor(name: str) -> float:
    return LIMIT_FACTORS[name.rpartition("_")[2]]
