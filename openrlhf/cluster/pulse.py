"""Reports that the processes of a run are alive: a thread of each process writes its counters to Ray's
key-value store every BEAT seconds, and its stacks when the driver requests them. watch.py reads both.

Calls to an actor would not do, because it may be busy for hours.
"""

import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from openrlhf.cluster import head

BEAT = 5.0
"""Seconds between two beats."""

STACKS_WANTED = "stacks wanted"

HEADLESS = head.LIMIT + 2 * head.POLL
"""Seconds without Ray's head after which a process ends itself. The driver, which tells the cause, ends
before."""

Progress = tuple[int, bool]
"""A counter that grows with the work of a process, and True if the process has work."""
Queue = tuple[int, int]
"""Number of requests that an engine answers, and of those that wait."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The counters of a process at one moment."""

    number: int
    progress: int
    is_busy: bool
    pid: int
    host: str
    queue: Queue | None = None
    """None for a process that is no engine."""


def start_pulse(progress: Callable[[], Progress], queue: Callable[[], Queue | None] = lambda: None) -> None:
    """Starts the thread of this actor's process. Also ends the process when Ray's head is dead, because Ray
    would wait a minute for the head, and then for child processes."""
    head.guard(lambda address: os.kill(os.getpid(), signal.SIGKILL), limit=HEADLESS)
    arguments = Board(), ray.get_runtime_context().get_actor_id(), progress, queue
    threading.Thread(target=_beat, args=arguments, name="pulse", daemon=True).start()


def _beat(
    board: "Board", actor: str, progress: Callable[[], Progress], queue: Callable[[], Queue | None]
) -> None:
    number, has_written = 0, False
    while True:
        number += 1
        beat = Beat(number, *progress(), os.getpid(), platform.node(), queue())
        with suppress(RayError):  # the store may be gone for a while, or for good; then Ray ends this process
            board.put(f"beat/{actor}", json.dumps(asdict(beat)))
            if not has_written and board.get(STACKS_WANTED) is not None:
                board.put(f"stacks/{actor}", stacks())
                has_written = True
        time.sleep(BEAT)


class Board:
    """The entries of this run in Ray's key-value store. Its methods never start Ray again after a
    shutdown."""

    def __init__(self) -> None:
        self.prefix = f"openrlhf/{ray.get_runtime_context().get_job_id()}/"

    def put(self, key: str, text: str) -> None:
        internal_kv._internal_kv_put(self.prefix + key, text, overwrite=True)

    def get(self, key: str) -> str | None:
        found = internal_kv._internal_kv_get(self.prefix + key)
        return None if found is None else found.decode()

    def read_beat(self, actor: str) -> Beat | None:
        """Returns the last beat of an actor's process; None before the first."""
        text = self.get(f"beat/{actor}")
        return None if text is None else Beat(**json.loads(text))

    def ask_for_stacks(self) -> None:
        """Requests that every process writes its stacks at its next beat."""
        self.put(STACKS_WANTED, "1")

    def read_stacks(self, actor: str) -> str | None:
        return self.get(f"stacks/{actor}")

    def clear(self) -> None:
        """Removes all entries of this run's processes."""
        internal_kv._internal_kv_del(self.prefix, del_by_prefix=True)


def stacks() -> str:
    """Returns the stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
