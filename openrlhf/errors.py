"""Ends a command on an error or a signal with a short message. `OPENRLHF_DEBUG=1` shows the whole
traceback."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_USAGE = 2
EXIT_FAILURE = 1

PATIENCE = 5.0
"""Seconds that other ranks wait before they print an error: by then rank 0 has usually printed it, and the
launcher has ended them."""
GRACE = 20.0
"""Seconds that a stopped run has to end before it is forced to: if the signal also ended Ray's servers, calls
to them never return."""


class Stopped(KeyboardInterrupt):
    """Raised by Ctrl-C or SIGTERM in a training command. `code`: its exit status, 128 + signal number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


def catch_signals() -> None:
    """Makes SIGINT and SIGTERM raise Stopped, once: later signals do not interrupt the shutdown."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, lambda number, frame: None)  # SIG_IGN complains about a signal under way
    stopped = Stopped(number)
    timer = threading.Timer(GRACE, _leave, [stopped])
    timer.daemon = True
    timer.start()
    raise stopped


def _leave(stopped: Stopped) -> None:
    _say(stopped)
    os._exit(stopped.code)


def _say(stopped: Stopped) -> None:
    if _rank() == 0:
        notes = " ".join(_notes(stopped))
        print(f"stopped {notes or 'before the first step'}", file=sys.stderr, flush=True)


@contextmanager
def telling(position: Callable[[], str]) -> Iterator[None]:
    """Adds the run's position to any error or stop inside, as a note."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        error.add_note(position())
        raise


@contextmanager
def short_errors() -> Iterator[None]:
    """Ends the process on an error inside: with its text alone for the error types that are written for users
    (ValueError, RuntimeError, FloatingPointError), with the traceback for any other."""
    try:
        try:
            yield
        except Exception as error:
            _end_with(error)
    except KeyboardInterrupt as stop:
        if os.environ.get("OPENRLHF_DEBUG"):
            raise
        if isinstance(stop, Stopped):
            _say(stop)
        sys.exit(getattr(stop, "code", 128 + signal.SIGINT))


def _end_with(error: Exception) -> None:
    cause = getattr(error, "cause", None) or error  # a Ray task's error carries the worker's
    written_for_people = type(cause) in (ValueError, RuntimeError, FloatingPointError)
    if os.environ.get("OPENRLHF_DEBUG") or not written_for_people:
        raise error
    if _rank() > 0:
        time.sleep(PATIENCE)
    print("\n".join([f"error: {cause}", *_notes(error)]), file=sys.stderr, flush=True)
    sys.exit(EXIT_USAGE if isinstance(cause, ValueError) else EXIT_FAILURE)


def _notes(error: BaseException | None) -> list[str]:
    """Returns the notes of an error, or else of the nearest error in its context that has notes."""
    notes: list[str] = []
    while error is not None and not notes:
        notes, error = list(getattr(error, "__notes__", ())), error.__context__
    return notes


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_first_of_machine() -> bool:
    """Whether this process has local rank 0, which prints for all processes of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def tell(text: str) -> None:
    """Prints a line on stderr, in the first process of each machine."""
    if is_first_of_machine():
        print(text, file=sys.stderr, flush=True)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
