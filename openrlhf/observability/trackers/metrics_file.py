"""Writes and reads metrics.jsonl, which every run folder has."""

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.observability.run_folder import read_steps, reading, to_json

if TYPE_CHECKING:
    from openrlhf.types import Metrics

logger = logging.getLogger(__name__)


class JsonlTracker:
    """Writes one line per step, `{"step": 12, "rollout/reward_mean": 0.5}`. It is in the file when `log`
    returns.

    NaN and infinities are the strings "NaN", "Infinity" and "-Infinity". Opening the file removes a
    half-written last line of a killed run. Rows that cannot be written, because of a full disk for instance,
    stay in memory with a warning and are written with a later row."""

    def __init__(self, path: Path):
        self._file, self._path, self._unwritten = _open_to_append(path), path, b""

    def log(self, step: int, metrics: "Metrics") -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._write((to_json({"step": step} | values | {"step": step}) + "\n").encode())

    def close(self) -> None:
        self._write(b"")
        if self._unwritten:
            logger.warning("%s lacks the last %d rows", self._path, self._unwritten.count(b"\n"))
        self._file.close()

    def _write(self, line: bytes) -> None:
        was_behind, self._unwritten = bool(self._unwritten), self._unwritten + line
        try:
            while self._unwritten:  # usually one write, so that a kill leaves at most one incomplete line
                self._unwritten = self._unwritten[os.write(self._file.fileno(), self._unwritten) :]
        except OSError as error:
            if not was_behind:
                reason = error.strerror or str(error)
                logger.warning(
                    "%s: rows wait in memory, because they cannot be written: %s", self._path, reason
                )


RENAMED = {"timing/score": "timing/logprobs", "memory/score_gb": "memory/logprobs_gb"}
"""Metric names of earlier versions -> current names."""


def read_metrics(path: Path) -> "dict[int, Metrics]":
    """Returns step -> metrics by their current names. Merges rows of the same step. NaN and infinities are
    numbers again."""
    steps: dict[int, Metrics] = {}
    with reading(path):
        for row in read_steps(path):
            metrics = {RENAMED.get(name, name): float(row[name]) for name in row if name != "step"}
            steps.setdefault(row["step"], {}).update(metrics)
    return steps


def _open_to_append(path: Path):
    """Opens the file for appending after the last complete line."""
    file = open(path, "ab+")  # noqa: SIM115
    size = file.seek(0, 2)
    tail_start = max(0, size - 1)
    file.seek(tail_start)
    if size and file.read(1) != b"\n":
        file.seek(0)
        complete, _, tail = file.read().rpartition(b"\n")
        try:
            json.loads(tail)
            file.write(b"\n")
        except ValueError:
            file.truncate(len(complete) + (1 if complete else 0))
        file.flush()
    return file
