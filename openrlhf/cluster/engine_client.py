"""The engines' control plane for the trainer's rank 0, over Ray. backends/weight_sync/sender.py describes the
protocol."""

from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from openrlhf.cluster.process_exits import describe_cause, is_death


class RayEngineClient:
    """Sends each call to all engines that have not failed, and waits for their answers."""

    def __init__(self, engines: Sequence[ActorHandle], workers_per_engine: int) -> None:
        self.engines, self.workers_per_engine = list(engines), workers_per_engine
        self.version = 0
        self.failures: dict[int, str] = {}
        self.dead: set[int] = set()
        self.ends_with_first = False

    @property
    def num_engines(self) -> int:
        return len(self.engines)

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        # Engines do not know their index: without an offset all would take the same ranks.
        def of_engine(i: int) -> dict:
            if "rank_offset" not in init_info:
                return init_info
            return init_info | {"rank_offset": init_info["rank_offset"] + i * self.workers_per_engine}

        self._all(lambda i, engine: engine.init_weight_transfer_engine.remote(of_engine(i)))

    def start_weight_update(self) -> None:
        self._all(lambda _, engine: engine.start_weight_update.remote())

    def update_weights(self, update_info: dict | list[dict]) -> None:
        # contains all tensors' names: stored once instead of sent to each engine
        shared = ray.put(update_info)
        self._all(lambda _, engine: engine.update_weights.remote(shared))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = str(self.version) if weight_version is None else weight_version
        self._all(lambda _, engine: engine.finish_weight_update.remote(version))

    def checksums(self) -> dict[int, list[int]]:
        return self._all(lambda _, engine: engine.loaded_checksums.remote())

    def _all(self, call: Callable[[int, ActorHandle], ray.ObjectRef]) -> dict[int, Any]:
        """Calls all engines that have not failed. Returns engine index -> answer. Records an engine that
        fails in `failures`; with `ends_with_first` raises its RayError instead."""
        asked = {call(i, e).future(): i for i, e in enumerate(self.engines) if i not in self.failures}
        answers = {}
        for done in as_completed(asked):  # bounded: by watchdog.py, which ends engines that hang
            try:
                answers[asked[done]] = done.result()  # bounded: it is done
            except RayError as error:
                if self.ends_with_first:
                    raise
                self.failures[asked[done]] = describe_cause(error)
                if is_death(error):
                    self.dead.add(asked[done])
        return answers
