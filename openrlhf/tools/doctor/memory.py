"""Finds peaks of memory near the capacity of the device, and peaks that grow."""

from collections.abc import Iterator

from openrlhf.api import FITS
from openrlhf.tools.doctor.messages import RELIEF
from openrlhf.tools.doctor.record import Finding, RunRecord

GROWTH = 1.3
"""Minimum ratio of a peak at the end of a run to that at its beginning that counts as growth."""


def memory_findings(run: RunRecord) -> Iterator[Finding]:
    capacity = _capacity(run)
    for name in run.names("memory/"):
        series, phase = run.series(name), name.removeprefix("memory/").removesuffix("_gb")
        if not len(series):
            continue
        peak = float(series.values.max())
        remedy = RELIEF.get(phase, "see `openrlhf plan` with the run's config.yaml")
        if capacity and peak > FITS * capacity:
            at = series.steps[int(series.values.argmax())]
            yield Finding(
                cause="memory",
                title=f"memory is nearly full in {phase}",
                score=0.8,
                evidence=(f"{name} reaches {peak:.3g} of {capacity:.3g} GiB at step {at}",),
                remedy=remedy,
            )
        elif series.trend > 5 and series.end > GROWTH * series.start and series.end - series.start > 0.5:
            length = run.series("rollout/total_length_mean")
            if len(length) and length.end / length.start > series.end / series.start:
                continue  # longer samples need more
            yield Finding(
                cause="memory",
                title=f"memory of {phase} grows",
                score=0.65,
                evidence=(series.describe(),),
                remedy="look for data that accumulate in the reward function or agent; " + remedy,
            )


def _capacity(run: RunRecord) -> float | None:
    """Returns the memory of this machine's devices in GiB; None if the run was on another machine."""
    from openrlhf.api import own_bytes  # imports torch, which takes seconds, and most runs need no capacity

    return own_bytes() / 2**30 if run.owner is not None and run.owner.is_here else None
