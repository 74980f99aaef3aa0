"""Offloading of optimizer state while other models use the GPU, and the memory that models hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, Self

import torch

from openrlhf.backends.distributed import release_cached_memory


class Offloadable(Protocol):
    def offload(self) -> None:
        """Moves optimizer state, master weights and gradients to the CPU."""
        ...

    def reload(self) -> None: ...


@contextmanager
def optimizer_loaded(model: Offloadable, sleeps: bool) -> Iterator[None]:
    """Keeps the optimizer's state on the GPU within the context. With `sleeps` it is offloaded outside."""
    if sleeps:
        model.reload()
    yield
    offload_optimizer(model, sleeps)


def offload_optimizer(model: Offloadable, sleeps: bool) -> None:
    """Moves the optimizer's state to the CPU where `sleeps`, so that rollout engines can use its memory."""
    if sleeps:
        model.offload()
    release_cached_memory()  # rollout engines take the memory that was free when they started


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
