"""Shares GPU memory between engines and models on the same devices. Without sleep flags nothing is offloaded.

start      engines start last, in the memory that the models leave
generate   engines awake: weights and KV cache       optimizer state on the CPU
update     engines asleep                            optimizer state of the model that trains on its GPU
sync       engines' weights awake, no KV cache yet   optimizer state on the CPU

Engines stay awake until a model is about to compute, so several submissions in a row wake them once.
Models on the same GPUs compute one after the other in every phase.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

import ray
from ray.actor import ActorHandle

from openrlhf.backends.offload import DeviceMemory
from openrlhf.backends.rollout import USABLE_FRACTION
from openrlhf.errors import ErrorCode, UsageError

EVERYTHING = ("weights", "kv_cache")


class EngineMemory:
    """Puts engines to sleep, and wakes the parts that a phase needs."""

    def __init__(self, engines: Sequence[ActorHandle], sleep: bool) -> None:
        """`engines`: awake, as after their start; `sleep`: off makes `sleep` and the wake calls do
        nothing."""
        self.engines, self.sleeps = engines, sleep
        self.awake = set(EVERYTHING)

    def wake(self) -> None:
        """Wakes weights and KV cache, for generation."""
        self._wake(EVERYTHING)

    def wake_for_sync(self) -> None:
        """Wakes the weights alone, for a weight sync."""
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
    """Returns the free fraction of the fullest GPU's memory, for an engine beside `models` (name -> memory of
    each rank's GPU). `weights`: bytes of the engine's weights per GPU. Raises UsageError if they do not
    fit."""
    fullest = min((gpu for gpus in models.values() for gpu in gpus), key=lambda gpu: gpu.free / gpu.total)
    if weights > USABLE_FRACTION * fullest.free:
        held = ", ".join(f"{name} {_gib(max(gpu.held for gpu in gpus))}" for name, gpus in models.items())
        text = (
            f"an engine's weights take {_gib(weights)} of each GPU. The models there hold {held}; "
            f"{_gib(fullest.free)} of {_gib(fullest.total)} are free.\nOffload models with "
            "--ds.enable_sleep, --ref.offload and --reward.offload, or split weights with --ds.zero_stage 3 "
            "or a larger --vllm.tensor_parallel_size or --vllm.pipeline_parallel_size."
        )
        raise UsageError(ErrorCode.RESOURCES, text, flag="--train.colocate_all")
    return fullest.free / fullest.total


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


class ExclusiveDevices:
    """Lets models on the same GPUs compute one after the other, so that only one needs working memory."""

    def __init__(self, shared: bool) -> None:
        """`shared`: off if calls need not wait for each other, as on a CPU."""
        self.shared = shared
        self.release: Callable[[], None] = lambda: None
        """Makes the engines on these devices free their memory; returns when they have."""
        self.under_way: list[ray.ObjectRef] = []
        self._lock = threading.Lock()

    def run(self, start: Callable[[list[ray.ObjectRef]], list[ray.ObjectRef]]) -> list[ray.ObjectRef]:
        """Starts calls after those under way, and returns them. `start(after)` returns at once; the calls
        that it starts wait in their workers for the results `after`."""
        self.release()
        with self._lock:
            self.under_way = start(self.under_way if self.shared else [])
            return self.under_way
