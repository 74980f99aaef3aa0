"""Follows the metrics file of a run while it grows, and returns its curves."""

from pathlib import Path
from threading import Lock

from openrlhf.api import ErrorCode, UsageError, thinned
from openrlhf.tools.view.followed_run import Tail, metrics_of

MOST_POINTS = 2000
"""Maximum number of points of a curve that the page receives."""


class Metrics:
    """The metrics of a run. An update reads only the new rows of its file."""

    def __init__(self, path: Path) -> None:
        self._path, self._tail, self._lock = path, Tail(path), Lock()
        self.steps: dict[int, dict[str, float]] = {}
        """Step -> metrics. Rows of the same step are merged."""
        self.num_rows = 0
        """Number of rows read so far. It changes whenever the metrics do."""

    def update(self) -> None:
        """Reads new rows; reads the file again from its beginning if it was replaced or cut. Raises
        UsageError after reading if a line is not a JSON object."""
        with self._lock:
            is_new, rows = self._tail.read()
            if is_new:
                self.steps, self.num_rows = {}, 0
            for step, metrics in map(metrics_of, rows):
                self.steps.setdefault(step, {}).update(metrics)
            self.num_rows += len(rows)
            if line := self._tail.first_unreadable:
                text = "not a JSON object; curves leave this line out"
                raise UsageError(ErrorCode.UNREADABLE, text, value=self._path, row=line)

    @property
    def last_step(self) -> int | None:
        with self._lock:
            return max(self.steps, default=None)

    def names(self) -> list[str]:
        with self._lock:
            return sorted({name for metrics in self.steps.values() for name in metrics})

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Returns the (step, value) pairs of a metric in the order of steps, at most MOST_POINTS."""
        with self._lock:
            points = [(step, values[name]) for step, values in sorted(self.steps.items()) if name in values]
        return thinned(points, MOST_POINTS)
