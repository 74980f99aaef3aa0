"""Ends vLLM's processes together with the process that drives them, even if that is killed. vLLM's core would
otherwise wait for requests for ever, and keep its memory."""

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
"""Seconds between looks at a process that is no parent."""


def lead() -> None:
    """Makes this process the one with which processes that call `follow` end."""
    os.environ[VARIABLE] = str(os.getpid())


def follow() -> None:
    """Makes this process end with the leading one. Has no effect in the leading one, or without one."""
    leader = int(os.environ.get(VARIABLE, os.getpid()))
    if leader == os.getpid():
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:  # a worker: vLLM's core, its parent, does not import this module
        threading.Thread(target=_watch, args=(leader, os.getppid()), name="lifeline", daemon=True).start()


def _watch(leader: int, core: int) -> None:
    """Kills the core when the leader is gone; this process follows the core."""
    while _is_alive(leader):
        time.sleep(POLL)
    os.kill(core, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
