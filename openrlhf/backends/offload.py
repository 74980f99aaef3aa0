"""Optimizer state that leaves a GPU while others compute there, and the memory that models hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, Self

import torch

from openrlhf.backends.distributed import release_cached_memory


class Offloadable(Protocol):
    def offload(self) -> None:
        """Optimizer state, master weights and gradients to the CPU."""
        ...

    def reload(self) -> None: ...


@contextmanager
def optimizer_loaded(model: Offloadable, sleeps: bool) -> Iterator[None]:
    """Inside, the optimizer's state is on the GPU; with `sleeps` only inside."""
    if sleeps:
        model.reload()
    yield
    offload_optimizer(model, sleeps)


def offload_optimizer(model: Offloadable, sleeps: bool) -> None:
    """Until it is needed, engines have the memory of its state."""
    if sleeps:
        model.offload()
    release_cached_memory()  # engines take what was free when they started


class DeviceMemory(NamedTuple):
    """Bytes of a GPU."""

    held: int
    """By this process's tensors."""
    free: int
    total: int

    @classmethod
    def now(cls) -> Self:
        """Of this process's GPU."""
        return cls(torch.cuda.memory_reserved(), *torch.cuda.mem_get_info())
