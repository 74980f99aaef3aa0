"""Offloads optimizer state while other models use the GPU, and measures GPU memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch

from openrlhf.backends.distributed import release_cached_memory
from openrlhf.backends.model_rank import TrainedRank


@contextmanager
def optimizer_loaded(model: TrainedRank, sleeps: bool) -> Iterator[None]:
    """Keeps the optimizer's state on the GPU within the context. With `sleeps` the state is offloaded outside
    of it."""
    if sleeps:
        model.reload()
    yield
    offload_optimizer(model, sleeps)


def offload_optimizer(model: TrainedRank, sleeps: bool) -> None:
    """Moves the optimizer's state to the CPU if `sleeps` is True, so that rollout engines can use the
    memory."""
    if sleeps:
        model.offload()
    release_cached_memory()  # engines on this GPU may use only what is free when they start


class DeviceMemory(NamedTuple):
    """Memory of a GPU in bytes."""

    held: int
    """Bytes reserved by this process's allocator."""
    free: int
    total: int

    @classmethod
    def now(cls) -> Self:
        """Measures this process's GPU."""
        return cls(torch.cuda.memory_reserved(), *torch.cuda.mem_get_info())
