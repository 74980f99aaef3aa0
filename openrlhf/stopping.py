"""Ends a training loop before its last step.

SIGINT (Ctrl-C) and SIGTERM: the first signal ends the run at the next step boundary, with a checkpoint; a
second one ends it at once. A step that takes longer than its limit ends the process with the stacks of its
threads.
"""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from openrlhf.errors import (
    EXIT_FAILURE,
    SIGNALS,
    Stopped,
    catch,
    is_first_of_machine,
    shutting_down,
    stop_at_once,
)

EXIT_STOPPED = 75
"""Exit status of a run that saved a checkpoint after a signal: EX_TEMPFAIL of sysexits.h, "try again"."""

ONE_STOP = 1.0
"""Seconds after the first signal in which another one counts as its repetition: on Ctrl-C a launcher forwards
the signal to processes that already got it from the terminal."""


class Dropped(BaseException):
    """Raised on a request to stop, in work that a resumed run repeats. Handlers of `Exception` do not catch
    it."""


class Stop:
    """A request to stop, which a training loop answers at a step boundary."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the first signal; None before any."""
        self._may_drop = False
        self._heard_at = 0.0
        self._timer: threading.Timer | None = None

    @property
    def is_requested(self) -> bool:
        return self.number is not None

    @contextmanager
    def deferred(
        self, grace: float, is_consequence: Callable[[Exception], bool] = lambda error: False
    ) -> Iterator[None]:
        """Turns the first signal inside the block into a request to stop. `grace` seconds later, or at a
        second signal, Stopped is raised; with `grace` 0 the first signal raises it. `is_consequence`: tells
        whether an error was caused by the end of other processes that got the signal too; Stopped replaces
        such an error."""
        if grace <= 0:
            yield
            return

        def hear(number: int, frame: FrameType | None) -> None:
            self._hear(number, frame, grace)

        before = catch(hear)
        try:
            yield
        except Exception as error:
            if self.number is not None and is_consequence(error):
                raise shutting_down(Stopped(self.number)) from error
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for number, handler in before.items():
                if signal.getsignal(number) is hear:  # otherwise the process is shutting down
                    catch(handler, [number])

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Raises Dropped as soon as a stop is requested inside the block, or at once if one was requested
        before it."""
        self._may_drop = True
        try:
            if self.is_requested:
                raise Dropped
            yield
        finally:
            self._may_drop = False

    def at_boundary(self, *, saved: bool) -> Stopped:
        """Returns the exception that ends the run at a step boundary. `saved`: tells whether a checkpoint of
        this step exists."""
        stopped = Stopped(self.number or SIGNALS[-1])
        stopped.is_at_boundary = True
        if saved:
            stopped.code = EXIT_STOPPED
        return shutting_down(stopped)

    def _hear(self, number: int, frame: FrameType | None, grace: float) -> None:
        now = time.monotonic()
        if self.number is not None:
            if now - self._heard_at >= min(ONE_STOP, grace):
                stop_at_once(number, frame)
            return
        self.number, self._heard_at = number, now
        if is_first_of_machine():  # print() fails in a handler that interrupts another print()
            text = f"stopping after this step, within {grace:g} s (--train.grace_seconds)"
            os.write(2, f"{text}; a second signal stops at once\n".encode())
        self._timer = threading.Timer(grace, os.kill, [os.getpid(), number])
        self._timer.daemon = True
        self._timer.start()
        if self._may_drop:
            raise Dropped


@contextmanager
def limited(seconds: float, where: Callable[[], str]) -> Iterator[None]:
    """Ends this process if the block takes longer than `seconds`, with the stacks of its threads on stderr.
    `where`: returns the name of this process and of what it does."""
    timer = threading.Timer(seconds, _end_hanging, [seconds, where])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_hanging(seconds: float, where: Callable[[], str]) -> None:
    os.write(2, f"{where()} made no progress for {seconds:g} s; its stacks:\n".encode())
    faulthandler.dump_traceback(2)
    os._exit(EXIT_FAILURE)
