"""Ends vLLM's processes when the process that drives them ends, even if it is killed. Otherwise vLLM's engine
core would wait for requests forever, and keep its memory."""

import ctypes
import os
import signal
import threading
import time

VARIABLE = "OPENRLHF_ENGINE_PID"
"""Variable with the process id of the process that drives an engine."""

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that this process gets when its parent dies."""

POLL = 1.0
"""Seconds between two checks whether the leading process lives, where it is not the parent."""


def lead() -> None:
    """Makes this process the leading one: processes that it starts and that call `follow` end with it."""
    os.environ[VARIABLE] = str(os.getpid())


def follow() -> None:
    """Makes this process end when the leading process ends. Has no effect in the leading process, or if there
    is none."""
    leader = int(os.environ.get(VARIABLE, os.getpid()))
    if leader == os.getpid():
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:  # a worker: vLLM's core, its parent, does not import this module
        threading.Thread(
            target=_watch, args=(leader, os.getppid()), name="parent-death guard", daemon=True
        ).start()


def _watch(leader: int, core: int) -> None:
    """Kills the engine core when the leader is gone. This process is a child of the core, and ends with
    it."""
    while _is_alive(leader):
        time.sleep(POLL)
    os.kill(core, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
