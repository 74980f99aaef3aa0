"""Who holds a GPU's memory when engines and models share it. Without sleep flags everyone stays.

start      engines come last, and take of the memory that the models leave
generate   engines awake: weights and KV cache       optimizer state on the CPU
update     engines asleep                            optimizer state of the model that trains on its GPU
sync       engines' weights awake, no KV cache yet   optimizer state on the CPU

Engines stay awake until a model is about to compute: who asks for prompts several times wakes them once.
Models on the same GPUs compute one after the other, whatever the phase.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

import ray
from ray.actor import ActorHandle

from openrlhf.backends.offload import DeviceMemory
from openrlhf.backends.rollout import USABLE_FRACTION

EVERYTHING = ("weights", "kv_cache")


class EngineMemory:
    """Puts engines to sleep and wakes what a phase needs."""

    def __init__(self, engines: Sequence[ActorHandle], sleep: bool) -> None:
        """The engines are awake, as they are after they started."""
        self.engines, self.sleeps = engines, sleep
        self.awake = set(EVERYTHING)

    def wake(self) -> None:
        """For generation."""
        self._wake(EVERYTHING)

    def wake_for_sync(self) -> None:
        self._wake(("weights",))

    def sleep(self) -> None:
        if self.sleeps and self.awake:
            ray.get([e.sleep.remote() for e in self.engines])
            self.awake = set()

    def _wake(self, tags: Sequence[str]) -> None:
        missing = [tag for tag in tags if tag not in self.awake]
        if self.sleeps and missing:
            ray.get([e.wake.remote(missing) for e in self.engines])
            self.awake |= set(missing)


def free_fraction(models: Mapping[str, "Sequence[DeviceMemory]"], weights: int) -> float:
    """What `models` of these names leave of the fullest GPU to an engine, `weights` bytes of whose weights
    are on each. ValueError where those do not fit."""
    fullest = min((gpu for gpus in models.values() for gpu in gpus), key=lambda gpu: gpu.free / gpu.total)
    if weights > USABLE_FRACTION * fullest.free:
        held = ", ".join(f"{name} {_gib(max(gpu.held for gpu in gpus))}" for name, gpus in models.items())
        raise ValueError(
            f"--train.colocate_all: an engine's weights take {_gib(weights)} of each GPU. The models there "
            f"hold {held}; {_gib(fullest.free)} of {_gib(fullest.total)} are free.\n"
            "Move models out of the way with --ds.enable_sleep, --ref.offload and --reward.offload, or "
            "split weights with --ds.zero_stage 3 or a larger --vllm.tensor_parallel_size or "
            "--vllm.pipeline_parallel_size."
        )
    return fullest.free / fullest.total


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


class ExclusiveDevices:
    """Models on the same GPUs compute one after the other, so that only one of them needs room for it."""

    def __init__(self, shared: bool) -> None:
        """`shared`: off where whoever starts may compute at once, as on a CPU."""
        self.shared = shared
        self.release: Callable[[], None] = lambda: None
        """Engines on these devices make room. Returns when they have."""
        self.under_way: list[ray.ObjectRef] = []
        self._lock = threading.Lock()

    def run(self, start: Callable[[list[ray.ObjectRef]], list[ray.ObjectRef]]) -> list[ray.ObjectRef]:
        """`start(after)` returns at once; what it starts waits, where it runs, for the results `after`."""
        self.release()
        with self._lock:
            self.under_way = start(self.under_way if self.shared else [])
            return self.under_way
