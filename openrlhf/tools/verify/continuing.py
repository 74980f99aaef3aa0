"""Checks that runs with one seed are equal, and that a resumed run equals an uninterrupted one, bit for
bit."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf.api import Metrics
from openrlhf.tools.verify.report import Clock, Finding, judged
from openrlhf.tools.verify.subjects import STEPS, Running, Subject

HALF = STEPS // 2
TAG = f"global_step{HALF}"
BITS = "equal bits: the same machine computes the same steps in the same order"


class State(NamedTuple):
    """Weights and metrics after some steps."""

    weights: dict[str, Tensor]
    metrics: list[Metrics]

    @classmethod
    def of(cls, running: Running, metrics: list[Metrics]) -> "State":
        weights = {name: weight.detach().cpu().clone() for name, weight in running.engine.weights()}
        return cls(weights, metrics)


def continuing_checks(subject: Subject, dtype: str, folder: Path) -> Iterator[Finding]:
    """Yields the outcome of both checks. The first run is saved in the middle and goes on; the second repeats
    its first half; the third is loaded from the checkpoint by a new engine and repeats the second half.
    `folder`: folder of the checkpoint."""
    clock = Clock()
    with subject.running(dtype, learns=True) as running:
        first = State.of(running, running.learn(0, HALF))
        running.engine.save_checkpoint(str(folder), TAG, {"step": HALF})
        whole = State.of(running, running.learn(HALF, STEPS))
    with subject.running(dtype, learns=True) as running:
        again = State.of(running, running.learn(0, HALF))
    error, where = difference(again, first)
    del again, first
    yield judged(
        "seeds",
        f"The same flags and seed give the same weights and metrics after {HALF} optimizer steps",
        error,
        0.0,
        how=BITS,
        where=where,
        meaning="A kernel adds in a random order, or the seed does not set all random numbers. Set "
        "--train.full_determinism_enable; if the check still fails, report it with the file of this "
        "verification.",
        seconds=clock.lap(),
    )
    with subject.running(dtype, learns=True) as running:
        state = running.engine.load_checkpoint(str(folder), TAG)
        assert state == {"step": HALF}
        resumed = State.of(running, running.learn(HALF, STEPS))
    error, where = difference(resumed, whole)
    yield judged(
        "resume",
        f"A run that is loaded from its checkpoint of step {HALF} equals an uninterrupted one after "
        f"{STEPS - HALF} more steps",
        error,
        0.0,
        how=BITS,
        where=where,
        meaning="The checkpoint lacks the state of the optimizer, the schedule or the random numbers. If "
        "`seeds` failed too, begin with its remedy. Report it with the file of this verification; do not "
        "resume runs of this setup.",
        seconds=clock.lap(),
    )


def difference(found: State, expected: State) -> tuple[float, str]:
    differences = {
        f"the metric {name} of step {i + 1} of the compared steps": gap(value, theirs[name])
        for i, (mine, theirs) in enumerate(zip(found.metrics, expected.metrics, strict=True))
        for name, value in mine.items()
    }
    for name, weight in found.weights.items():
        largest = (weight.double() - expected.weights[name].double()).abs().max()
        differences[name] = float(largest.nan_to_num(torch.inf))
    worst = max(differences, key=differences.__getitem__)
    return differences[worst], worst


def gap(found: float, expected: float) -> float:
    """Returns the absolute difference of two numbers. It is 0 if both are the same infinity or both are NaN,
    as gradient norms in fp16 may be, and infinite if only one of them is finite."""
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return 0.0
    difference = abs(found - expected)
    return math.inf if math.isnan(difference) else difference
