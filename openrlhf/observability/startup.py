"""Measures the seconds of each stage of a run's start."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openrlhf.types import Metrics


class StartClock:
    """The seconds of each stage of a run's start. Stages may overlap, so that their sum may exceed the
    whole."""

    def __init__(self, *, age: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        """`age`: seconds since the start began."""
        self._now = now
        self._began = now() - age
        self.stages: dict[str, float] = {}
        """Seconds of each finished stage, in the order in which stages first finished."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures a stage. The seconds of repeated stages add up."""
        began = self._now()
        try:
            yield
        finally:
            self.add(name, self._now() - began)

    def add(self, name: str, seconds: float) -> None:
        self.stages[name] = self.stages.get(name, 0.0) + seconds

    @property
    def total(self) -> float:
        """The seconds since the start began."""
        return self._now() - self._began

    def line(self) -> str:
        """Formats the seconds as a line: `started in 14 s (Ray 3, engines 8, models 3)`."""
        stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.stages.items())
        return f"started in {self.total:.0f} s ({stages})"

    def metrics(self) -> "Metrics":
        """Returns the metrics `start/{stage}` and `start/total` in seconds."""
        seconds = {**self.stages, "total": self.total}
        return {f"start/{name.lower().replace(' ', '_')}": value for name, value in seconds.items()}


def process_clock() -> StartClock:
    """Returns a clock that started with this process, so that it includes imports."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine's start
    return StartClock(age=max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began))
