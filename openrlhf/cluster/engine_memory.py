"""GPU memory that engines and models on the same GPUs take in turns. Without the sleep flags nothing is
offloaded.

start      engines start last, in the memory that the models leave
generate   engines awake: weights and KV cache       optimizer state on the CPU
update     engines asleep                            optimizer state of the model that trains on its GPU
sync       engines' weights awake, no KV cache yet   optimizer state on the CPU

Engines stay awake until a model is about to compute, so several submissions in a row wake them only once.
Models on the same GPUs compute one after the other in every phase.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import ray

from openrlhf.backends.offload import DeviceMemory
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.memory.engines import USABLE_FRACTION

if TYPE_CHECKING:
    from openrlhf.cluster.engine_supervisor import Answers

EVERYTHING = ("weights", "kv_cache")


class EngineMemory:
    """Offloads all engines (sleep), and reloads the parts that a phase needs (wake)."""

    def __init__(self, call: "Callable[..., Answers]", sleep: bool) -> None:
        """`call`: function that calls a method of all engines, which are awake. `sleep`: False: nothing is
        ever offloaded."""
        self.call, self.sleeps = call, sleep
        self.awake = set(EVERYTHING)

    @property
    def is_awake(self) -> bool:
        """True while engines can generate."""
        return self.awake == set(EVERYTHING)

    def sleep(self) -> None:
        """Frees the GPU memory of all engines, which must be idle."""
        if self.sleeps and self.awake:
            self.call("sleep").result()  # bounded: by watchdog.py
            self.awake = set()

    def wake(self, tags: Sequence[str] = EVERYTHING) -> None:
        """Wakes weights and KV cache, for generation. A weight sync needs the weights alone."""
        missing = [tag for tag in tags if tag not in self.awake]
        if self.sleeps and missing:
            self.call("wake", missing).result()  # bounded: by watchdog.py
            self.awake |= set(missing)


def free_fraction(models: Mapping[str, "Sequence[DeviceMemory]"], weights: int) -> float:
    """Returns the free fraction of the memory of the fullest GPU. `models`: name of a model -> memory of each
    rank's GPU. `weights`: bytes of an engine's weights per GPU. Raises UsageError if the weights do not
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
    """Runs models on the same GPUs one after the other, so that only one needs working memory at a time."""

    def __init__(self, shared: bool) -> None:
        """`shared`: False if calls need not wait for each other, as on CPUs."""
        self.shared = shared
        self.release: Callable[[], None] = lambda: None
        """Function that offloads the engines on these devices, and returns when their memory is free."""
        self.running: list[ray.ObjectRef] = []
        self._lock = threading.Lock()

    def run(self, start: Callable[[list[ray.ObjectRef]], list[ray.ObjectRef]]) -> list[ray.ObjectRef]:
        """Starts calls that run after the current ones, and returns them. `start(after)` must return at once;
        the calls that it starts wait in their workers for the results `after`."""
        self.release()
        with self._lock:
            self.running = start(self.running if self.shared else [])
            return self.running
