"""Follows the files of a run to which rows are appended, and keeps its metrics."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from openrlhf.api import RENAMED, ErrorCode, UsageError
from openrlhf.api import reading_run as reading
from openrlhf.tools.view.curves import Curve


class Tail:
    """Reads the rows that are appended to a file of JSON lines."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        """`most_bytes`: bytes at the end of the file that the first call reads; None reads the whole file."""
        self._path, self._most_bytes = path, most_bytes
        self._begin(-1, 0)

    def _begin(self, inode: int, offset: int) -> None:
        self._inode, self._offset, self._num_lines = inode, offset, 0
        self.num_unreadable = 0
        """Number of complete lines that are not JSON objects."""
        self.first_unreadable = 0
        """Line number of the first unreadable line among the lines that were read, from 1; 0 if there is
        none."""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Returns True if the file was replaced or cut since the last call, and its new complete rows."""
        try:
            with reading(self._path), open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                is_new = status.st_ino != self._inode or status.st_size < self._offset
                if is_new:
                    skipped = status.st_size - self._most_bytes if self._most_bytes else 0
                    self._begin(status.st_ino, max(0, skipped))
                skips_first = is_new and self._offset > 0
                file.seek(self._offset)
                content, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            is_new = self._inode != -1
            self._begin(-1, 0)
            return is_new, []
        self._offset += len(content) + len(newline)
        lines = content.split(b"\n") if newline else []
        return is_new, list(self._rows(lines[skips_first:]))

    def _rows(self, lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            self._num_lines += 1
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield row
            else:
                self.num_unreadable += 1
                self.first_unreadable = self.first_unreadable or self._num_lines


class Metrics:
    """The metrics of a run. An update reads only the new rows of its file."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        """`most_bytes`: see `Tail`."""
        self._path, self._tail, self._lock = path, Tail(path, most_bytes), Lock()
        self.steps: dict[int, dict[str, float]] = {}
        """Step -> metrics by their current names, in the order of their last rows. Values that are no numbers
        are left out."""
        self.num_rows = 0
        """Number of rows read so far. It changes whenever the metrics do."""

    @property
    def num_unreadable(self) -> int:
        return self._tail.num_unreadable

    def read(self) -> None:
        """Reads new rows; reads the file again from its beginning if it was replaced or cut."""
        with self._lock:
            is_new, rows = self._tail.read()
            if is_new:
                self.steps, self.num_rows = {}, 0
            for row in rows:
                step = integer(row.pop("step", 0))
                self.steps[step] = self.steps.pop(step, {}) | metrics_of(row)
            self.num_rows += len(rows)

    def update(self) -> None:
        """Reads new rows, and raises UsageError after that if a line is not a JSON object."""
        self.read()
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

    def curve(self, name: str) -> Curve:
        with self._lock:
            return [(step, values[name]) for step, values in sorted(self.steps.items()) if name in values]


def integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row by their current names. NaN and infinities, which are strings in the file,
    are numbers again."""
    found = {}
    for name, value in row.items():
        try:
            found[RENAMED.get(name, name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
    return found
