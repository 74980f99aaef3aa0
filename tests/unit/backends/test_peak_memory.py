"""Peak memory of each phase, by the kernel's own figures, and by CUDA's as it would report them."""

import mmap
from types import SimpleNamespace

import pytest

from openrlhf.backends import peak_memory
from openrlhf.backends.peak_memory import PeakMemory, memory_metrics

MIB = 2**20


def hold(size: int) -> None:
    """Holds this many bytes for a moment, in fresh pages: memory that was freed may still count."""
    with mmap.mmap(-1, size) as pages:
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1


def test_a_phase_needs_what_it_held_at_a_time() -> None:
    """64 MiB are held twice, one after the other; a later phase has nothing of it. The kernel counts pages in
    batches, and 8 MiB are the interpreter's."""
    memory = PeakMemory()
    with memory.during("small"):
        pass
    for _ in range(2):
        with memory.during("large"):
            hold(64 * MIB)
    with memory.during("after"):
        pass
    peaks = memory.take()
    assert 63 * MIB <= peaks["large"] - peaks["small"] < 72 * MIB
    assert abs(peaks["after"] - peaks["small"]) < 8 * MIB
    assert memory.take() == {}


def test_a_phase_that_comes_again_has_the_larger_peak() -> None:
    memory = PeakMemory()
    for size in (64, 1):
        with memory.during("logprobs"):
            hold(size * MIB)
    with memory.during("other"):
        hold(MIB)
    peaks = memory.take()
    assert peaks["logprobs"] - peaks["other"] >= 48 * MIB


def test_on_a_gpu_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 of 80 bytes are free; this process holds 20 and has held 35, so that 30 are of others."""
    started = []
    cuda = SimpleNamespace(
        reset_peak_memory_stats=lambda: started.append(True),
        mem_get_info=lambda: (30, 80),
        memory_reserved=lambda: 20,
        max_memory_reserved=lambda: 35,
    )
    monkeypatch.setattr(peak_memory.torch, "cuda", cuda)
    monkeypatch.setattr(peak_memory, "DEVICE_TYPE", "cuda")
    memory = PeakMemory()
    with memory.during("update"):
        assert started == [True]
    assert memory.take() == {"update": 65}


def test_where_the_kernel_starts_no_new_peak_it_is_that_of_the_process(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(peak_memory.Path, "write_text", refuse)
    peak_memory.restart()
    assert peak_memory.peak() > 0


def test_the_process_that_needs_most_counts() -> None:
    processes = [{"logprobs": 2**30, "update": 2**31}, {"logprobs": 3 * 2**29}, {"generate": 2**30}, {}]
    assert memory_metrics(processes) == {
        "memory/generate_gb": 1.0,
        "memory/logprobs_gb": 1.5,
        "memory/update_gb": 2.0,
    }
