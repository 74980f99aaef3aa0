"""Who holds the GPU's memory when engines and trainers share it. Without sleep flags, or without GPUs,
everyone stays.

generate   engines awake: weights and KV cache       trainer's optimizer state on the CPU
update     engines asleep                            trainer's optimizer state back (see cluster/worker.py)
sync       engines' weights awake, no KV cache yet   trainer's optimizer state on the CPU
"""

from collections.abc import Sequence

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
