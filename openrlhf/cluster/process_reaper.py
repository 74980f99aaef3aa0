"""Ends the processes that a run has started on its machine once the run's own process has ended, even by
`kill -9`. Ray's agents would otherwise stay alive for minutes.

The module is also a program that imports only the standard library: python process_reaper.py PID.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache

POLL = 1.0
"""Seconds between two scans of the processes that the run has started."""

GRACE = 2.0
"""Seconds that these processes have to end by themselves before they are killed."""


@cache
def start_process_reaper() -> subprocess.Popen:
    """Starts the program for this process, in a separate session that signals of the terminal do not
    reach."""
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    none = subprocess.DEVNULL
    return subprocess.Popen(command, start_new_session=True, stdin=none, stdout=none, stderr=none)


def reap(owner: int) -> None:
    """Waits until the process `owner` has ended, and kills all its descendants."""
    gone = os.pidfd_open(owner)
    started = descendants(owner, {})
    while not select.select([gone], [], [], POLL)[0]:
        started = descendants(owner, started)
    started = descendants(owner, started)  # also those of the last second
    time.sleep(GRACE)
    for pid, since in started.items():
        if _stat(pid)[1] == since:  # otherwise the number belongs to another process by now
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(owner: int, known: dict[int, int]) -> dict[int, int]:
    """Returns pid -> start time of the descendants of `owner` and of the processes in `known` that still
    exist, whose parents may have ended. Leaves out this process."""
    parents = {int(name): _stat(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    found = {pid: since for pid, since in known.items() if parents.get(pid, (0, 0))[1] == since}
    size = -1
    while size != len(found):
        size = len(found)
        found |= {p: since for p, (parent, since) in parents.items() if parent == owner or parent in found}
    found.pop(os.getpid(), None)
    return found


def _stat(pid: int) -> tuple[int, int]:
    """Returns a process's parent and start time; (0, 0) if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    return int(fields[1]), int(fields[19])


if __name__ == "__main__":
    reap(int(sys.argv[1]))
