"""Measures a process's peak memory in each phase of a step, at a cost of 0.1 ms per phase."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from openrlhf.device import DEVICE_TYPE
from openrlhf.types import Metrics

Peaks = Mapping[str, int]
"""Maps a phase to its peak memory in bytes."""


class PeakMemory:
    """Peak memory of this process in each phase since the last call of `take`."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Measures the peak within the context as part of `phase`. Phases may repeat, but not nest."""
        restart()
        yield
        self.peaks[phase] = max(self.peaks.get(phase, 0), peak())

    def take(self) -> Peaks:
        """Returns the peaks, and forgets them."""
        taken, self.peaks = self.peaks, {}
        return taken


def restart() -> None:
    """Resets the peak that `peak` returns. On a CPU some sandboxes forbid this; `peak` then counts from the
    start of the process."""
    if DEVICE_TYPE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(PermissionError):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak() -> int:
    """Returns the peak in bytes. On a GPU: this process's peak of reserved memory plus the current memory of
    other processes. On a CPU: this process's peak of resident memory."""
    if DEVICE_TYPE == "cuda":
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        return others + torch.cuda.max_memory_reserved()
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def memory_metrics(processes: Sequence[Peaks]) -> Metrics:
    """Returns `memory/{phase}_gb`: the maximum over processes, in GiB."""
    phases = sorted({phase for peaks in processes for phase in peaks})
    return {f"memory/{phase}_gb": max(peaks.get(phase, 0) for peaks in processes) / 2**30 for phase in phases}
