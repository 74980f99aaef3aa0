"""Curves of metrics in the report and the viewer: their sections, equal ones, points and running means."""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from openrlhf.api import evenly, is_evaluation, thinned

Curve = list[tuple[int, float]]
"""The (step, value) pairs of a metric, in the order of steps."""

OWN = "Your own metrics"
"""Heading of the metrics from the reward's `extra_logs`."""
TIMES = "Time and memory"
SECTIONS = {
    "Results": "reward score acc margin pass_rate",
    OWN: "",
    "Answers": "length truncated repetition duplicate num_samples generated failed error",
    "Training": "loss kl entropy clip ratio logprob log_prob grad_norm lr values return",
    "More": "",
    TIMES: "",
}
"""Heading -> words in the names of its metrics, in the order of the page. A metric belongs to the first
match, else to "More"."""
HEADINGS = list(SECTIONS)
SMOOTHING = 0.07
"""Share of a run's steps that a running mean covers."""
FEW = 30
"""Number of points below which each counts, and none are averaged."""


def sections(names: Iterable[str], logs: Iterable[str]) -> dict[str, list[str]]:
    """Returns heading -> metrics, in the order of the page. `logs`: names in the run's `extra_logs`, of which
    reward models are no section of their own."""
    own = {f"rollout/{name}" for name in logs if not name.startswith("reward_model/")}
    found: dict[str, list[str]] = {}
    for (section, _), name in sorted(((_place(name, own), name) for name in names), key=lambda pair: pair[0]):
        found.setdefault(HEADINGS[section], []).append(name)
    return found


def _place(name: str, own: Container[str]) -> tuple[int, int]:
    """Returns the sort key of a metric: its section and the place of the first matching word in it,
    of its last part or else of the whole name. Evaluation metrics come first, except those about answers."""
    if name in own:
        return HEADINGS.index(OWN), 0
    if name.startswith(("timing/", "memory/")):
        return HEADINGS.index(TIMES), 0
    short = name.rpartition("/")[2].lower()
    if is_evaluation(name) and not any(word in short for word in SECTIONS["Answers"].split()):
        return 0, -1
    places = (
        (section, place)
        for text in (short, name.lower())
        for section, words in enumerate(SECTIONS.values())
        for place, word in enumerate(words.split())
        if word in text
    )
    return next(places, (HEADINGS.index("More"), 0))


def equal_metrics(runs: Sequence[Mapping[str, Curve]], but: Container[str] = ()) -> dict[str, str]:
    """Returns metric -> earlier metric with equal values at every step of every run, such as pass@1 and the
    mean of scores that are 0 or 1. Values are equal up to float32 rounding. Leaves out the metrics in
    `but`."""
    before: dict[Any, list[tuple[str, Any]]] = {}
    same: dict[str, str] = {}
    for name in dict.fromkeys(name for curves in runs for name in curves if name not in but):
        own = [curves.get(name, []) for curves in runs]
        values = np.array([value for curve in own for _, value in curve])
        others = before.setdefault(tuple(tuple(step for step, _ in curve) for curve in own), [])
        close = partial(np.allclose, values, rtol=1e-6, atol=0, equal_nan=True)
        if twin := next((other for other, its in others if close(its)), None):
            same[name] = twin
        else:
            others.append((name, values))
    return same


def is_constant(curve: Curve) -> bool:
    """Returns True if all values are one finite number."""
    return math.isfinite(curve[0][1]) and len({value for _, value in curve}) == 1


class DrawnCurve(NamedTuple):
    """The points of a curve that are drawn."""

    steps: list[int]
    values: list[float]
    means: list[float]
    """Running mean at each step, NaN where the value is not finite; empty if the curve is not noisy."""
    num_bad: int
    """Number of the values that are not finite, of which at most as many as there are points are kept."""


def drawn_curve(curve: Curve, most: int, smoothing: float = SMOOTHING) -> DrawnCurve:
    """Chooses at most `most` points of a curve. Running means are over the share `smoothing` of its steps."""
    finite = [point for point in curve if math.isfinite(point[1])]
    bad = [point for point in curve if not math.isfinite(point[1])]
    points = sorted(thinned(finite, most) + evenly(bad, most))
    means = {}
    if smoothing and len(finite) >= FEW and is_noisy(finite):
        means = dict(running_mean(finite, smoothing))
    return DrawnCurve(
        steps=[step for step, _ in points],
        values=[value for _, value in points],
        means=[means.get(step, math.nan) for step, _ in points] if means else [],
        num_bad=len(bad),
    )


def is_noisy(curve: Curve) -> bool:
    """Returns True if the curve's total variation is more than 4 times its range. It is less for a schedule
    or a slow trend."""
    values = np.array([value for _, value in curve])
    return bool(np.abs(np.diff(values)).sum() > 4 * np.ptp(values))


def running_mean(curve: Curve, smoothing: float = SMOOTHING) -> Curve:
    """Averages each point with its neighbours on both sides, so that trends are not delayed."""
    half, places = max(2, int(len(curve) * smoothing / 2)), np.arange(len(curve))
    sums = np.cumsum([0.0, *(value for _, value in curve)])
    starts, ends = np.maximum(places - half, 0), np.minimum(places + half + 1, len(curve))
    means = (sums[ends] - sums[starts]) / (ends - starts)
    return [(step, mean) for (step, _), mean in zip(curve, means.tolist(), strict=True)]
