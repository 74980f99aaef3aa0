"""Follows a run, whether it still runs or not, by reading new content of the files in its folder."""

import fcntl
import math
import time
from pathlib import Path
from typing import Any, Literal

from openrlhf.api import (
    JOURNAL_FILE,
    RunIndex,
    UsageError,
    best_to_worst,
    read_table,
    unwaiting,
)
from openrlhf.api import LOCK_FILE as LOCK
from openrlhf.tools.command_line.runs import PlacedRun
from openrlhf.tools.view.metrics import Metrics, Tail, integer

STEPS_KEPT = 2000
"""Number of the newest steps whose metrics are kept."""
TAIL_BYTES = 16 << 20
"""Maximum number of bytes, at the end of a file, that the first refresh reads."""
PROBE_EVERY = 5.0
"""Seconds between two probes of the folder's lock."""
QUEUES_VALID = 60.0
"""Seconds after which the queues of engines, which a run writes every 5 seconds, are no longer shown."""
SAMPLE_COLUMNS = ("prompt_id", "prompt", "response", "reward", "outcome", "error", "finish_reason")
SAMPLES_KEPT = 16

State = Literal["running", "ended", "died", "unknown"]
Sample = dict[str, Any]


class FollowedRun:
    """The state of a run, which `refresh` updates from its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = PlacedRun(folder)
        self.steps: dict[int, dict[str, float]] = {}
        """Step -> metrics, of the newest steps and of those with the seconds of a start."""
        self.warnings: list[tuple[int, str]] = []
        """(step, text) of each warning about the run's health."""
        self.samples: list[Sample] = []
        """A few samples of the newest file of rollouts, from best to worst, and failed ones."""
        self.samples_file = ""
        self.samples_error = ""
        """Reason why the newest samples cannot be read; empty if they can."""
        self.queues: list[tuple[int, int] | None] = []
        """Running and waiting requests of each engine of a live run; None for an engine that starts."""
        self.state: State = "unknown"
        self._metrics = Metrics(self.folder.metrics_path, TAIL_BYTES)
        self._health = Tail(self.folder.health_path, TAIL_BYTES)
        self._model = -1, ""
        self._rollouts = self._probed = -1.0

    def refresh(self) -> None:
        self._metrics.read()
        self.steps = self._metrics.steps
        for step in list(self.steps)[:-STEPS_KEPT]:
            if "start/total" not in self.steps[step]:
                del self.steps[step]
        is_new, rows = self._health.read()
        self.warnings = [] if is_new else self.warnings
        self.warnings += [(integer(row.get("step")), str(row.get("text", ""))) for row in rows]
        self._read_samples()
        self._probe()
        self.queues = self._read_queues()

    @property
    def start(self) -> dict[str, float]:
        """Seconds of each stage of the last start, `start/{stage}`."""
        rows = (metrics for metrics in reversed(self.steps.values()) if "start/total" in metrics)
        return {name: value for name, value in next(rows, {}).items() if name.startswith("start/")}

    @property
    def num_unreadable(self) -> int:
        return self._metrics.num_unreadable + self._health.num_unreadable

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def model(self) -> str:
        """Name of the model that the last start trains; empty if unknown."""
        path = self.folder.path
        try:
            changed = (path / "config.yaml").stat().st_mtime_ns
            if changed != self._model[0]:
                self._model = changed, RunIndex(path).model
        except (OSError, UsageError):
            self._model = -1, ""
        return self._model[1]

    @property
    def age(self) -> float | None:
        """Seconds since the last step, before the first one since the start; None if nothing is written."""
        for path in (self.folder.metrics_path, self.folder.path / "config.yaml"):
            try:
                return max(0.0, time.time() - path.stat().st_mtime)
            except OSError:
                continue
        return None

    @property
    def seconds_per_step(self) -> float | None:
        """Mean duration of the last 50 steps; None if unknown. The first step, which compiles and warms up,
        counts only if there is no other."""
        found = [metrics.get("timing/step_total", math.nan) for step, metrics in self.steps.items() if step]
        found = [seconds for seconds in found if math.isfinite(seconds)]
        recent = found[1:][-50:] or found
        return sum(recent) / len(recent) if recent else None

    @property
    def eta(self) -> float | None:
        """Estimated remaining seconds; None if they are unknown or the run does not go on."""
        total, seconds = self.folder.total_steps, self.seconds_per_step
        if self.state != "running" or total is None or seconds is None or self.last_step >= total:
            return None
        return max(0.0, (total - self.last_step) * seconds - min(self.age or 0.0, seconds))

    def _read_samples(self) -> None:
        try:
            changed = self.folder.rollouts_path.stat().st_mtime
            if changed == self._rollouts:
                return
            found = self.folder.rollouts_path.glob("*.parquet")
            files = [p for p in found if (m := JOURNAL_FILE.fullmatch(p.name)) and m["name"] != "filtered"]
            newest = max(files, key=lambda path: path.stat().st_mtime_ns, default=None)
        except OSError:  # no rollouts, or a file that a resumed run just removed
            return
        self._rollouts = changed
        if newest is None:
            return
        self.samples_file = newest.name
        try:
            table = read_table(newest, SAMPLE_COLUMNS)
            rewards = table["reward"].to_pylist()
            chosen = best_to_worst(rewards, SAMPLES_KEPT, failed=SAMPLES_KEPT // 4)
            self.samples, self.samples_error = table.take(chosen).to_pylist(), ""
        except (FileNotFoundError, UsageError) as error:
            self.samples, self.samples_error = [], str(error)

    def _read_queues(self) -> list[tuple[int, int] | None]:
        """Returns no queues if the run does not write them any more."""
        try:
            age = time.time() - self.folder.queues_path.stat().st_mtime
        except OSError:
            return []
        is_live = self.state in ("running", "unknown") and age < QUEUES_VALID
        return self.folder.read_queues() if is_live else []

    def _probe(self) -> None:
        if time.monotonic() - self._probed < PROBE_EVERY and self._probed >= 0:
            return
        self._probed = time.monotonic()
        match is_locked(self.folder.path):
            case True:
                self.state = "running"
            case None:
                self.state = "unknown"
            case False:
                self.state = "ended" if self.folder.wrote_last("report.html") else "died"


def is_locked(folder: Path) -> bool | None:
    """Returns True if a living process holds the lock of a run folder; None if there is no lock file, or the
    file system has no locks. The probe holds a shared lock for some microseconds."""
    try:
        with open(folder / LOCK, "rb", opener=unwaiting) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
