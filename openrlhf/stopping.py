"""SIGINT (Ctrl-C) and SIGTERM in a training loop: the first signal ends the run at the border of a step, with
a checkpoint; a second one ends it at once."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from openrlhf.errors import SIGNALS, Stopped, catch, is_first_of_machine, shutting_down, stop_at_once

EXIT_STOPPED = 75
"""Exit status of a run that saved a checkpoint after a signal: EX_TEMPFAIL of sysexits.h, "try again"."""

ONE_STOP = 1.0
"""Seconds in which further signals are repetitions of the first: on Ctrl-C a launcher passes on a signal that
the terminal has sent to its processes already."""


class Dropped(BaseException):
    """Raised in work that a stop does not wait for, because a resumed run repeats it. No handler of errors
    catches it."""


class Stop:
    """A request to stop, which a training loop answers at the border of a step."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The first signal. None: nobody asked to stop."""
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
        """Makes the first signal inside a request, which the loop has `grace` seconds to answer; then, or at
        a second signal, Stopped is raised at once. 0: the first signal raises it. `is_consequence`: tells
        whether an error follows from the end of processes that had the same signal; Stopped replaces it."""
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
        """Raises Dropped on a request to stop, also on one from before."""
        self._may_drop = True
        try:
            if self.is_requested:
                raise Dropped
            yield
        finally:
            self._may_drop = False

    def at_border(self, *, saved: bool) -> Stopped:
        """Returns the exception that ends the run at the border of a step. `saved`: there is a checkpoint of
        this step."""
        stopped = Stopped(self.number or SIGNALS[-1])
        stopped.is_at_border = True
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
            text = f"stopping after this step, within {grace:g} s (--train.grace_seconds); again: at once\n"
            os.write(2, text.encode())
        self._timer = threading.Timer(grace, os.kill, [os.getpid(), number])
        self._timer.daemon = True
        self._timer.start()
        if self._may_drop:
            raise Dropped
