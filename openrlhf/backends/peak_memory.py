"""The most memory that a process needs in each phase of a step, at 0.1 ms a phase."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from openrlhf.device import DEVICE_TYPE
from openrlhf.types import Metrics

Peaks = Mapping[str, int]
"""Phase -> bytes."""


class PeakMemory:
    """Of this process's phases, since they were last taken."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """May repeat; not one inside another."""
        restart()
        yield
        self.peaks[phase] = max(self.peaks.get(phase, 0), peak())

    def take(self) -> Peaks:
        taken, self.peaks = self.peaks, {}
        return taken


def restart() -> None:
    """From here on `peak` counts. Where the kernel lets a process do that, as it does outside of some
    sandboxes: elsewhere a process's peak is that since it began."""
    if DEVICE_TYPE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(PermissionError):
            Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Bytes. On a GPU: at this process's peak, with what others hold of it now. Without one: resident of this
    process."""
    if DEVICE_TYPE == "cuda":
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        return others + torch.cuda.max_memory_reserved()
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def memory_metrics(processes: Sequence[Peaks]) -> Metrics:
    """`memory/{phase}_gb` of the process, or GPU, that needs most."""
    phases = sorted({phase for peaks in processes for phase in peaks})
    return {f"memory/{phase}_gb": max(peaks.get(phase, 0) for peaks in processes) / 2**30 for phase in phases}
