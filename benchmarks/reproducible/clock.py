"""Minutes and CPU-minutes of a row's training."""

import resource
import time


class Clock:
    """Minutes and CPU-minutes since it was made."""

    def __init__(self) -> None:
        self.started = time.monotonic(), cpu_seconds()

    def read(self) -> tuple[float, float]:
        wall, cpu = self.started
        return (time.monotonic() - wall) / 60, (cpu_seconds() - cpu) / 60


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
