"""The limits of the mismatch between the log-probs of sampler and trainer that rounding explains: a run stops
or warns beyond them."""

from dataclasses import dataclass, field

from openrlhf.api import MISMATCH_GAPS, MISMATCH_PROBE, ErrorCode, Metrics, RunError
from openrlhf.tools.selftest.invariants import SAME_POLICY

STOP_ABOVE = {"fp32": 0.04, "fp16": 0.04, "bf16": 0.3}
"""Means of |log r| in nats above which a run stops, by `--ds.param_dtype`: about 80 relative rounding errors
of 2^-11 (also for fp32, since GPUs may round the factors of products to TF32) or of 2^-8. A mixture of
experts in bfloat16 measures about 0.02."""
NEVER_WARN_BELOW = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""Means of |log r| in nats below which a run never warns."""
LIMIT_FACTORS = {"mean": 1.0, "p99": 10.0, "max": 100.0}
"""Limit of each statistic as a multiple of the limit of the mean."""
NUM_FIRST = 3
"""Number of initial values of a statistic with which later values are compared."""
GROWTH = 5.0
"""A run warns if a value exceeds this multiple of the largest initial value."""


def fresh_mismatch(metrics: Metrics) -> dict[str, float]:
    """Returns the statistics `MISMATCH_GAPS` of fresh samples, by metric name. Empty if the step has no fresh
    samples or the policy's log-probs were not computed."""
    names = [f"mismatch/fresh_{name}" for name in MISMATCH_GAPS]
    if names[0] not in metrics and metrics.get("rollout/staleness_max") == 0:
        names = [f"mismatch/{name}" for name in MISMATCH_GAPS]
    return {name: metrics[name] for name in names if name in metrics}


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
        mismatch = fresh_mismatch(metrics) | (
            {MISMATCH_PROBE: metrics[MISMATCH_PROBE]} if MISMATCH_PROBE in metrics else {}
        )
        above = {name for name, value in mismatch.items() if not value <= self._limit(name)}
        messages = [self._message(name, mismatch[name]) for name in sorted(above - self.reported)]
        self.reported = (self.reported - mismatch.keys()) | above
        for name, value in mismatch.items():
            if len(values := self.first.setdefault(name, [])) < NUM_FIRST:
                values.append(value)
        return messages

    def _limit(self, name: str) -> float:
        values, most = self.first.get(name, []), SAME_POLICY[self.dtype] * _limit_factor(name)
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
