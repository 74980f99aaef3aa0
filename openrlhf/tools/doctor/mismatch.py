"""Measures the mismatch between the log-probs of sampler and trainer: the step at which it begins, and
statistics that hint at its causes."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from openrlhf.api import evenly, read_table
from openrlhf.api import reading_run as reading
from openrlhf.tools.doctor.record import RunRecord

NOISE = {"fp32": 3e-4, "fp16": 4e-3, "bf16": 2e-2}
"""--ds.param_dtype -> mean of |log r|, in nats, up to which rounding explains a mismatch."""
EXAMINED = 9
"""Approximate number of steps whose rollouts are read for the course of the mismatch."""


MOST_ROWS = 64
MOST_TOKENS = 1024
"""Number of tokens of a sequence that are examined."""
FIRST = 4
"""Number of actions at the beginning of an answer, on which a wrong prompt has most influence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MismatchRow:
    """A sequence with the log-probs of its L tokens' A actions on both sides."""

    token_ids: np.ndarray
    """(L,)"""
    actions: np.ndarray
    """(A,) positions in `token_ids` of the actions."""
    sampler: np.ndarray
    """(A,) log-probs of the sampler."""
    trainer: np.ndarray
    """(A,) log-probs of the trainer before the update."""
    version: int
    """Weight version that sampled the last action."""
    prompt: str
    response: str | None
    source: str = "default"
    """The prompt's `datasource`, which is the name of its task."""

    @property
    def difference(self) -> np.ndarray:
        """(A,) log r, the log of the ratio of the trainer's to the sampler's probability."""
        return self.trainer - self.sampler

    @property
    def prompt_length(self) -> int:
        return int(self.actions[0])


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The mismatch of a run, computed from its rollouts."""

    run: RunRecord
    course: Mapping[int, float]
    """Step -> mean of |log r|, for the steps that were read."""
    rows: Mapping[int, list[MismatchRow]]
    """Step -> sequences of the current weights."""
    noise: float
    """Mean of |log r| up to which rounding explains a mismatch."""

    @property
    def above(self) -> list[int]:
        """Steps with a mismatch that rounding does not explain."""
        return [step for step, value in self.course.items() if value > self.noise]

    @property
    def from_start(self) -> bool:
        """True if the first step has the mismatch, so that no weight sync can have caused it."""
        return bool(self.above) and self.above[0] == min(self.course)


def read_sequences(path: Path) -> list[MismatchRow]:
    """Reads the sequences of a step that have actions and log-probs of both sides, without images."""
    columns = [
        *("token_ids", "action_ranges", "weight_versions", "rollout_log_probs", "log_probs"),
        *("prompt", "response", "images", "source"),
    ]
    table = read_table(path, columns).slice(0, MOST_ROWS).to_pylist()
    with reading(path):
        return [_row(row) for row in table if row["log_probs"] and not row.get("images")]


def fresh(rows: Sequence[MismatchRow]) -> list[MismatchRow]:
    """Returns the rows of the newest weight version. Rows of older ones differ from the trainer anyway."""
    newest = max((row.version for row in rows), default=0)
    return [row for row in rows if row.version == newest]


def _row(row: dict) -> MismatchRow:
    spans = [np.arange(span["start"], span["end"]) for span in row["action_ranges"]]
    actions = np.concatenate(spans)
    inside = actions < max(MOST_TOKENS, actions[0] + FIRST)
    return MismatchRow(
        token_ids=np.array(row["token_ids"])[: actions[inside][-1] + 1],
        actions=actions[inside],
        sampler=np.array(row["rollout_log_probs"], float)[inside],
        trainer=np.array(row["log_probs"], float)[inside],
        version=row["weight_versions"][-1]["version"] if row["weight_versions"] else 0,
        prompt=row["prompt"] or "",
        response=row["response"] if inside.all() else None,
        source=row["source"],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Signs:
    """Statistics of the differences of log-probs, which hint at their cause without a model."""

    size: float
    """Mean of |d|, d = log r."""
    bias: float
    """Mean of d divided by `size`: from -1 to 1; 1 if the trainer's log-probs are always higher."""
    quiet: float
    """Median of |d| divided by `size`: near 0 if few actions make up the mismatch, else 0.5 to 1."""
    curve: float
    """Fraction of the variance of d that a cubic function of the sampler's log-prob explains."""
    growth: float
    """Mean |d| of the later half of the positions divided by that of the earlier half."""
    onset: float
    """Mean |d| of the first FIRST actions of an answer divided by that of the others."""
    random: float
    """Mean deviation of log-probs among equal actions after equal tokens, divided by `size`; NaN without such
    actions."""


def compute_signs(rows: Sequence[MismatchRow]) -> Signs:
    d = np.concatenate([row.difference for row in rows])
    s = np.concatenate([row.sampler for row in rows])
    positions = np.concatenate([row.actions for row in rows])
    places = np.concatenate([np.arange(len(row.actions)) for row in rows])
    size = float(np.abs(d).mean())
    late = positions > np.median(positions)
    return Signs(
        size=size,
        bias=float(d.mean()) / size,
        quiet=float(np.median(np.abs(d))) / size,
        curve=_explained(s, d),
        growth=_ratio(np.abs(d), late),
        onset=_ratio(np.abs(d), places < FIRST),
        random=_randomness(rows) / size,
    )


def _ratio(values: np.ndarray, inside: np.ndarray) -> float:
    """Returns the mean of the values inside over that of the others; 1 if one is empty or both are 0."""
    if not 0 < inside.sum() < len(values) or not values.any():
        return 1.0
    others = float(values[~inside].mean())
    return float(values[inside].mean()) / others if others else math.inf


def _explained(x: np.ndarray, y: np.ndarray) -> float:
    finite = np.isfinite(x) & np.isfinite(y)  # a side may call a token impossible
    x, y = x[finite], y[finite]
    if len(x) < 8 or x.std() == 0 or y.std() == 0:
        return 0.0
    scaled = (x - x.mean()) / x.std()
    rest = y - np.polyval(np.polyfit(scaled, y, 3), scaled)
    return float(1 - rest.var() / y.var())


def _randomness(rows: Sequence[MismatchRow]) -> float:
    """Returns the mean absolute deviation of the sampler's or the trainer's log-probs, whichever is larger,
    among equal actions after equal tokens; NaN without any."""
    groups: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        ids = tuple(row.token_ids.tolist())
        for position, s, t in zip(row.actions, row.sampler, row.trainer, strict=True):
            groups[row.version, ids[: position + 1]].append((s, t))
    pairs = [np.array(group) for group in groups.values() if len(group) > 1]
    spreads = [np.abs(group - group.mean(axis=0)).mean(axis=0) for group in pairs]
    return float(np.mean(spreads, axis=0).max()) if spreads else float("nan")


def find_noise(run: RunRecord) -> float:
    """Returns the mean of |log r| up to which rounding explains a mismatch."""
    return NOISE[str(run.flag("ds.param_dtype", "bf16"))]


def stale_steps(run: RunRecord) -> set[float]:
    """Returns the steps without a sample of the current weights, whose log-probs differ without a defect."""
    return {
        row["step"]
        for row in run.numbers
        if row.get("rollout/staleness_max") and "mismatch/fresh_abs_diff_mean" not in row
    }


def measure_mismatch(run: RunRecord) -> Mismatch | None:
    """Computes the mismatch from rollouts of the first steps and of some later ones, see `stale_steps`.
    Returns None if they have no log-probs of the trainer."""
    steps = sorted(run.journal.keys() - stale_steps(run))
    chosen = sorted({*steps[:3], *evenly(steps, EXAMINED - 2)})
    rows = {step: fresh(read_sequences(run.journal[step])) for step in chosen}
    course = {
        step: float(np.abs(np.concatenate([row.difference for row in found])).mean())
        for step, found in rows.items()
        if found
    }
    return Mismatch(run=run, course=course, rows=rows, noise=find_noise(run)) if course else None
