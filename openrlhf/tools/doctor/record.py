"""Reads a run folder: metrics as series over steps, warnings, configuration, rollouts, and the run's
process. A finding is a cause with its evidence and its remedy."""

import math
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from openrlhf.tools.command_line.runs import PlacedRun
from openrlhf.tools.view.metrics import metrics_of

FEWEST = 8
"""Number of steps below which a series has no trend."""
START_SLACK = 5.0
"""Seconds by which the times of a lock and of the start of its process may differ."""


CERTAIN, LIKELY = 0.9, 0.6
"""Minimum scores of causes that are called certain and likely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A cause of a problem."""

    cause: str
    """Identifier of the kind of cause, such as "flat-reward" (docs/diagnosis.md)."""
    title: str
    score: float
    """Confidence from 0 to 1, by which findings are sorted. It is a rule of thumb, not a probability."""
    evidence: tuple[str, ...]
    """Sentences with numbers and steps."""
    remedy: str

    @property
    def confidence(self) -> str:
        return "certain" if self.score >= CERTAIN else "likely" if self.score >= LIKELY else "possible"

    @property
    def is_wrong(self) -> bool:
        """False if the run only takes longer than it could."""
        return self.cause not in ("slow-steps", "late-rank")

    def as_data(self) -> dict[str, Any]:
        return asdict(self) | {"confidence": self.confidence}


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Values of a metric at the steps that report it."""

    name: str
    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    @property
    def quarter(self) -> int:
        """Number of values in a quarter, at least 1."""
        return max(1, len(self) // 4)

    @property
    def start(self) -> float:
        """Mean of the first quarter."""
        return float(self.values[: self.quarter].mean()) if len(self) else math.nan

    @property
    def end(self) -> float:
        """Mean of the last quarter."""
        return self.last(self.quarter)

    @property
    def trend(self) -> float:
        """Difference of `end` and `start` in standard errors; 0 if there are fewer than FEWEST values."""
        if len(self) < FEWEST:
            return 0.0
        first, last = self.values[: self.quarter], self.values[-self.quarter :]
        error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / self.quarter)
        difference = self.end - self.start
        return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0

    def last(self, count: int) -> float:
        """Returns the mean of the last `count` values; NaN without any."""
        return float(self.values[-count:].mean()) if len(self) else math.nan

    def describe(self) -> str:
        return f"{self.name} {self.start:.3g} -> {self.end:.3g} (steps {self.steps[0]} to {self.steps[-1]})"


class RunRecord(PlacedRun):
    """A run with the courses of its metrics and its process."""

    def series(self, name: str) -> Series:
        finite = [(row["step"], row[name]) for row in self.numbers if name in row]
        return Series(name, np.array([step for step, _ in finite], int), np.array([v for _, v in finite]))

    @cached_property
    def numbers(self) -> list[dict[str, float]]:
        """The rows of metrics with their finite values, by their current names."""
        rows = map(metrics_of, self.rows)
        return [{name: value for name, value in row.items() if math.isfinite(value)} for row in rows]

    def names(self, prefix: str) -> list[str]:
        return list(dict.fromkeys(name for row in self.numbers for name in row if name.startswith(prefix)))

    def flag(self, name: str, default: Any = None) -> Any:
        """Returns the value of a flag ("rollout.temperature"); `default` if it is None or not recorded."""
        value = self.flags.get(name)
        return default if value is None else value

    @property
    def last_step(self) -> int:
        return max((row["step"] for row in self.rows), default=0)

    @cached_property
    def journal(self) -> dict[int, Path]:
        """Step -> file of the rollouts that the step trained on."""
        return self.rollouts()

    @cached_property
    def start_day(self) -> date:
        """The day on which the run started; today if its command line is not recorded."""
        start = re.match(r"# (\d{4}-\d\d-\d\d) ", self.read("argv.txt"))
        return date.fromisoformat(start[1]) if start else date.today()

    @cached_property
    def process(self) -> psutil.Process | None:
        """The run's process; None if it has ended, is on another machine, or its number now belongs to
        another process."""
        owner = self.owner
        if owner is None or not owner.is_here:
            return None
        with suppress(psutil.NoSuchProcess):  # it may end meanwhile
            found = psutil.Process(owner.pid)
            return found if found.create_time() <= owner.since.timestamp() + START_SLACK else None
        return None

    @property
    def limits(self) -> tuple[float, int]:
        """Top-p and top-k of sampling; (1, -1) if the sampler samples from all tokens."""
        return float(self.flag("rollout.top_p", 1.0)), int(self.flag("rollout.top_k", -1))

    @property
    def has_nucleus(self) -> bool:
        return self.limits[0] < 1 or self.limits[1] > 0

    @property
    def keeps_nucleus(self) -> bool:
        """True if the trainer normalises over the nucleus that the sampler recorded."""
        return self.has_nucleus and int(self.flag("rollout.max_kept_tokens", 32)) > 0

    @property
    def has_adapters(self) -> bool:
        return int(self.flag("ds.lora.rank", 0)) > 0
