"""Outcomes of rows, their confidence intervals, and the comparison of two outcomes."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple, Self

RESULTS = Path(__file__).parents[1] / "results"
CONFIDENT, SURE = 1.96, 3.0
"""Standard deviations of intervals that the page shows (95 %), and of those that a repetition is compared
with (99.7 %)."""


class Interval(NamedTuple):
    low: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True)
class Score:
    """A number of solved problems."""

    solved: int
    total: int

    @property
    def fraction(self) -> float:
        return self.solved / self.total

    def interval(self, z: float = CONFIDENT) -> Interval:
        """Returns Wilson's score interval of a binomial proportion p = solved / n:

            (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

        Wilson, Probable Inference, the Law of Succession, and Statistical Inference, 1927
        """
        n, p = self.total, self.fraction
        middle, half = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        scale = 1 + z * z / n
        return Interval(max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """The first step of which at least the task's fraction of samples was solved."""

    step: int
    samples: int
    minutes: float
    cpu_minutes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run of a row."""

    before: Score
    after: Score
    curve: list[float]
    """Fraction of solved samples of each step."""
    goal: Goal | None
    minutes: float
    """Minutes of all steps, without the start and the evaluations."""
    cpu_minutes: float
    weights: str
    """SHA-256 of the trained weights."""
    machine: str
    versions: dict[str, str]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        read: dict[str, Any] = {name: Score(**values[name]) for name in ("before", "after")}
        read["goal"] = Goal(**values["goal"]) if values["goal"] else None
        return cls(**{**values, **read})


def find_goal(
    curve: Iterable[float], times: Iterable[tuple[float, float]], goal: float, samples: int
) -> Goal | None:
    """Returns where a run reached the goal. `times`: minutes and CPU-minutes at the end of each step;
    `samples`: those of a step."""
    for step, (solved, (minutes, cpu)) in enumerate(zip(curve, times, strict=True), 1):
        if solved >= goal:
            return Goal(
                step=step, samples=step * samples, minutes=round(minutes, 2), cpu_minutes=round(cpu, 2)
            )
    return None


def read(row: str, folder: Path = RESULTS) -> dict[int, Outcome]:
    """Returns the outcomes of a row by seed; none if it has not been run."""
    path = folder / f"{row}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return {int(seed): Outcome.from_dict(values) for seed, values in found.items()}


def write(row: str, seed: int, outcome: Outcome, folder: Path = RESULTS) -> None:
    """Replaces the outcome of a row and seed."""
    folder.mkdir(exist_ok=True)
    outcomes = dict(sorted((read(row, folder) | {seed: outcome}).items()))
    text = json.dumps({str(seed): asdict(o) for seed, o in outcomes.items()}, indent=1)
    (folder / f"{row}.json").write_text(text + "\n")


def agrees(outcome: Outcome, known: Iterable[Outcome]) -> bool:
    """Tells whether a repetition's interval overlaps the range of the intervals of known runs.

    Another CPU draws other samples and so trains another policy. The range over seeds shows how much policies
    differ, and intervals of 99.7 % how much 256 answers do: two scores of one policy leave each other's
    interval once in 45,000 pairs, at 6 / sqrt(2) = 4.2 standard deviations of their difference.
    """
    intervals = [one.after.interval(SURE) for one in known]
    whole = Interval(min(i.low for i in intervals), max(i.high for i in intervals))
    return outcome.after.interval(SURE).overlaps(whole)
