"""The gap between the log-probs of sampler and trainer: whether there is one, and since when."""

from collections.abc import Iterator

from openrlhf.algorithms.mismatch import NEVER_WARN_BELOW
from openrlhf.diagnosis.finding import Finding
from openrlhf.diagnosis.record import RunRecord, Series

NOISE = {"fp32": 3e-4, "fp16": 4e-3, "bf16": 2e-2}
"""Means of |log r| in nats up to which rounding explains a gap, by `--ds.param_dtype`."""


def gap_series(run: RunRecord) -> Series:
    """Returns the mean of |log r|, of samples of the current weights where they are reported apart."""
    fresh = run.series("mismatch/fresh_abs_diff_mean")
    return fresh if len(fresh) else run.series("mismatch/abs_diff_mean")


def noise_of(run: RunRecord) -> float:
    """Returns the mean of |log r| up to which rounding explains a gap."""
    return NOISE.get(str(run.flag("ds.param_dtype", "bf16")), NEVER_WARN_BELOW["bf16"])


def gap_findings(run: RunRecord) -> Iterator[Finding]:
    gap, noise = gap_series(run), noise_of(run)
    above = gap.steps[gap.values > noise]
    if not len(above) or gap.last(5) <= noise:
        return
    yield Finding(
        cause="gap",
        title="gap between sampler and trainer",
        score=0.8,
        evidence=(
            f"{gap.describe()}; rounding explains up to {noise:g} nats",
            f"above it since step {above[0]}",
        ),
        remedy="--algo.advantage.is_correction_enable limits the damage until the cause is found",
    )
