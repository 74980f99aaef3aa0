"""Detects the death of Ray's head, the process gcs_server. Without it the cluster makes no progress, but Ray
ends its processes only after a minute, and engines later."""

import socket
import threading
import time
from collections.abc import Callable

import ray

POLL = 5.0
"""Polling interval of the head's port in seconds, and timeout of one poll."""

LIMIT = 15.0
"""Seconds for which no process listens at the head's port until the head counts as dead."""


def guard(
    end: Callable[[str], object], ended: threading.Event | None = None, *, limit: float = LIMIT
) -> None:
    """Starts a thread that calls `end` with the head's address once the head is dead. `ended`: event that
    ends the thread; None: it runs as long as the process."""
    arguments = ray.get_runtime_context().gcs_address, end, ended or threading.Event(), limit
    threading.Thread(target=_guard, args=arguments, name="head", daemon=True).start()


def _guard(address: str, end: Callable[[str], object], ended: threading.Event, limit: float) -> None:
    last = time.monotonic()
    while not ended.wait(POLL):
        if not is_refused(address):
            last = time.monotonic()
        elif time.monotonic() - last >= limit and not ended.is_set():
            end(address)
            return


def is_refused(address: str) -> bool:
    """Returns True if the machine of this address (host:port) answers that no process listens there. If
    nothing answers, the head may be busy or the network down, and Ray decides."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=POLL).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
