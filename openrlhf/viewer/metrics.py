"""Follows the metrics of a run: its curves, and what is new in a file that grows."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.observability.metric_names import HEADLINES
from openrlhf.observability.trackers.metrics_file import RENAMED

MOST_POINTS = 2000
"""Points of a curve that the page receives. Of more, the smallest and the largest of each stretch stay."""


class Metrics:
    """The metrics of a run, read again only as far as its file has grown."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        self._reset(None)

    def _reset(self, inode: int | None) -> None:
        self._inode, self._offset = inode, 0
        self.steps: dict[int, dict[str, float]] = {}
        """Step -> metrics. Rows of the same step are merged."""
        self.num_rows = 0
        """Rows read so far, which changes whenever the metrics do."""

    def update(self) -> None:
        """Reads new rows. A file that was replaced or is shorter is read from its beginning."""
        with self._lock:
            try:
                stat = os.stat(self._path)
            except FileNotFoundError:
                return
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self._reset(stat.st_ino)
            if stat.st_size > self._offset:
                self._read()

    def _read(self) -> None:
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            complete = file.read().rpartition(b"\n")[0]
        for row in self._rows(complete):
            step = int(row.pop("step"))
            values = {RENAMED.get(name, name): float(value) for name, value in row.items()}
            self.steps.setdefault(step, {}).update(values)
            self.num_rows += 1
        self._offset += len(complete) + 1 if complete else 0

    def _rows(self, lines: bytes) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines.splitlines(), start=self.num_rows + 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                text = f"not JSON: {error}. Delete the line to go on."
                raise UsageError(ErrorCode.UNREADABLE, text, value=self._path, row=number) from None

    def names(self) -> list[str]:
        with self._lock:
            return sorted({name for metrics in self.steps.values() for name in metrics})

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Returns the (step, value) pairs of a metric in the order of steps, at most about MOST_POINTS."""
        with self._lock:
            points = [(step, values[name]) for step, values in sorted(self.steps.items()) if name in values]
        return thinned(points)


def thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns at most about MOST_POINTS points: the first, the last, and of each stretch its smallest and its
    largest value."""
    if len(points) <= MOST_POINTS:
        return points
    width = -(-len(points) * 2 // MOST_POINTS)
    kept = {points[0][0]: points[0], points[-1][0]: points[-1]}
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        for point in (min(stretch, key=_height), max(stretch, key=_height)):
            kept[point[0]] = point
    return [kept[step] for step in sorted(kept)]


def _height(point: tuple[int, float]) -> float:
    return point[1]


def headlines(names: Sequence[str]) -> list[str]:
    """Returns the metrics that show the progress of a run, the most important first."""
    chosen: list[str] = []
    for pattern, limit in HEADLINES:
        found = [name for name in names if re.fullmatch(pattern, name)]
        chosen += [name for name in found[:limit] if name not in chosen]
    return chosen
