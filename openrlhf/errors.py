"""How a command ends when it cannot go on or shall not: the few lines that help. `OPENRLHF_DEBUG=1` shows the
whole trace."""

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
"""Seconds that other ranks wait before they say what is wrong: mostly rank 0 has said it by then, and their
launcher has ended them."""
GRACE = 20.0
"""Seconds that a stopped run may take to end. Where the signal also ended Ray's servers, nothing answers."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM to a training command."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


def catch_signals() -> None:
    """From now on SIGINT and SIGTERM raise Stopped, once: what ends a run is not interrupted itself."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, lambda number, frame: None)  # SIG_IGN would complain of one that is under way
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
    """What ends the run inside is told together with how far the run came."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        error.add_note(position())
        raise


@contextmanager
def short_errors() -> Iterator[None]:
    """Errors that are written for people end the process with their text alone; any other keeps its trace."""
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
    cause = getattr(error, "cause", None) or error  # of a Ray task: what the worker raised
    written_for_people = type(cause) in (ValueError, RuntimeError, FloatingPointError)
    if os.environ.get("OPENRLHF_DEBUG") or not written_for_people:
        raise error
    if _rank() > 0:
        time.sleep(PATIENCE)
    print("\n".join([f"error: {cause}", *_notes(error)]), file=sys.stderr, flush=True)
    sys.exit(EXIT_USAGE if isinstance(cause, ValueError) else EXIT_FAILURE)


def _notes(error: BaseException | None) -> list[str]:
    """Of the error and of what it interrupted."""
    notes: list[str] = []
    while error is not None and not notes:
        notes, error = list(getattr(error, "__notes__", ())), error.__context__
    return notes


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_first_of_machine() -> bool:
    """Whether this is the process of its machine that speaks for the others."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def tell(text: str) -> None:
    """Print a line on stderr, in the first process of each machine."""
    if is_first_of_machine():
        print(text, file=sys.stderr, flush=True)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
