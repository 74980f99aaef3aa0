"""Runs all trackers of a run: its metrics file, and a thread for each other tracker.

trackers = Trackers(JsonlTracker(folder.metrics_path), open_trackers(run))
trackers.log(12, {"rollout/reward_mean": 0.5})
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from openrlhf.faults import fault
from openrlhf.observability.trackers.base import Tracker
from openrlhf.observability.trackers.metrics_file import JsonlTracker
from openrlhf.types import Metrics

logger = logging.getLogger(__name__)

FAILURES_ALLOWED = 3
QUEUE_ROWS = 1000
CLOSE_SECONDS = 60.0


class Trackers:
    """The metrics file of a run (the record) and its other trackers (the background trackers).

    Errors of the record are raised. Each background tracker has a separate thread, so that it neither stops
    nor delays training. A background tracker that fails three times in a row is switched off with a warning.
    Rows that a slow one cannot take are dropped and counted."""

    def __init__(self, record: JsonlTracker, background: Sequence[Tracker] = ()):
        self._record = record
        self._background = [_BackgroundTracker(tracker) for tracker in background]

    def log(self, step: int, metrics: Metrics) -> None:
        self._record.log(step, metrics)
        for other in self._background:
            other.put(lambda tracker: _log(tracker, step, metrics))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        rows = [list(row) for row in rows]
        for other in self._background:
            other.put(lambda tracker: tracker.table(step, name, columns, rows))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Closes the trackers, waiting at most `timeout` seconds for each background tracker."""
        self._record.close()
        for other in self._background:
            other.close(timeout)


def _log(tracker: Tracker, step: int, metrics: Metrics) -> None:
    fault("tracker.log")
    tracker.log(step, metrics)


class _BackgroundTracker:
    """A tracker behind a queue and a thread."""

    def __init__(self, tracker: Tracker):
        self._tracker = tracker
        self._name = type(tracker).__name__.removesuffix("Tracker")
        self._jobs: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(QUEUE_ROWS)
        self._off = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker-{self._name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[Tracker], None]) -> None:
        if self._off:
            return
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._dropped += 1

    def close(self, timeout: float) -> None:
        try:
            self._jobs.put(None, timeout=timeout)
        except queue.Full:
            self._dropped += self._jobs.qsize()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("%s did not finish in %.0f s; metrics.jsonl is complete", self._name, timeout)
        if self._dropped:
            logger.warning(
                "%s was too slow and lacks %d rows; metrics.jsonl has all", self._name, self._dropped
            )

    def _work(self) -> None:
        failures, last = 0, ""
        while job := self._jobs.get():  # bounded: an idle thread
            if self._off:
                continue
            # A background tracker uses disks, networks and services; training goes on whatever it raises.
            try:
                job(self._tracker)
                failures = 0
            except BaseException as error:  # also SystemExit, which would end this thread silently
                failures, last = failures + 1, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                if failures == FAILURES_ALLOWED:
                    self._off = True
                    logger.warning(
                        "%s is switched off after %d failures in a row (%s); metrics.jsonl has all rows",
                        self._name, failures, last,
                    )  # fmt: skip
        if failures and not self._off:
            logger.warning(
                "%s lacks the last %d rows (%s); metrics.jsonl has all", self._name, failures, last
            )
        try:
            self._tracker.close()
        except BaseException as error:
            logger.warning("%s did not close (%s: %s)", self._name, type(error).__name__, error)
