"""Who holds a GPU's memory when engines and models share it. Without sleep flags, or without GPUs, everyone
stays.

generate   engines awake: weights and KV cache       optimizer state on the CPU
update     engines asleep                            optimizer state of the model that trains on its GPU
sync       engines' weights awake, no KV cache yet   optimizer state on the CPU

Models on the same GPUs compute one after the other, whatever the phase.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import ray
from ray.actor import ActorHandle

EVERYTHING = ("weights", "kv_cache")


class Residency:
    """Puts engines to sleep and wakes what a phase needs."""

    def __init__(self, engines: Sequence[ActorHandle], sleep: bool) -> None:
        """The engines are awake, as they are after they started."""
        self.engines, self.sleep = engines, sleep
        self.awake = set(EVERYTHING)

    def wake(self) -> None:
        """For generation."""
        self._wake(EVERYTHING)

    def wake_for_sync(self) -> None:
        self._wake(("weights",))

    def rest(self) -> None:
        if self.sleep:
            ray.get([e.sleep.remote() for e in self.engines])
            self.awake = set()

    def _wake(self, tags: Sequence[str]) -> None:
        missing = [tag for tag in tags if tag not in self.awake]
        if self.sleep and missing:
            ray.get([e.wake.remote(missing) for e in self.engines])
            self.awake |= set(missing)


class Offloadable(Protocol):
    def offload(self) -> None:
        """Optimizer state, master weights and gradients to the CPU."""
        ...

    def reload(self) -> None: ...


@contextmanager
def optimizer_present(model: Offloadable, sleeps: bool) -> Iterator[None]:
    """Inside, the optimizer's state is on the GPU; with `sleeps` only inside."""
    if sleeps:
        model.reload()
    yield
    rest_optimizer(model, sleeps)


def rest_optimizer(model: Offloadable, sleeps: bool) -> None:
    """Until it is needed, engines have the memory of its state."""
    # Loads deepspeed, which engines are without.
    from openrlhf.engine.distributed import release_cached_memory

    if sleeps:
        model.offload()
        release_cached_memory()


class ExclusiveDevices:
    """Models on the same GPUs compute one after the other, so that only one of them needs room for it."""

    def __init__(self, shared: bool) -> None:
        """`shared`: off where whoever starts may compute at once, as on a CPU."""
        self.shared = shared
        self.under_way: list[ray.ObjectRef] = []
        self._lock = threading.Lock()

    def run(self, start: Callable[[list[ray.ObjectRef]], list[ray.ObjectRef]]) -> list[ray.ObjectRef]:
        """`start(after)` returns at once; what it starts waits, where it runs, for the results `after`."""
        with self._lock:
            self.under_way = start(self.under_way if self.shared else [])
            return self.under_way
