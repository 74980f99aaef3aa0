"""The engines' control plane for the trainer's rank 0, over Ray. See engine/weight_sync.py for the
protocol."""

from collections.abc import Callable, Sequence

import ray
from ray.actor import ActorHandle


class RayEngineClient:
    """Every call goes to all engines and waits for all of them."""

    def __init__(self, engines: Sequence[ActorHandle], workers_per_engine: int) -> None:
        self.engines, self.workers_per_engine = list(engines), workers_per_engine
        self.version = 0

    @property
    def num_workers(self) -> int:
        return len(self.engines) * self.workers_per_engine

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        # Engines do not know of each other: without an offset of its own each would take the same ranks.
        first = init_info.get("rank_offset")
        infos = [
            init_info if first is None else init_info | {"rank_offset": first + i * self.workers_per_engine}
            for i in range(len(self.engines))
        ]
        ray.get(
            [e.init_weight_transfer_engine.remote(info) for e, info in zip(self.engines, infos, strict=True)]
        )

    def start_weight_update(self) -> None:
        self._all(lambda engine: engine.start_weight_update.remote())

    def update_weights(self, update_info: dict | list[dict]) -> None:
        self._all(lambda engine: engine.update_weights.remote(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = str(self.version) if weight_version is None else weight_version
        self._all(lambda engine: engine.finish_weight_update.remote(version))

    def checksums(self) -> list[int]:
        return [
            c for checksums in self._all(lambda engine: engine.loaded_checksums.remote()) for c in checksums
        ]

    def _all(self, call: Callable[[ActorHandle], ray.ObjectRef]) -> list:
        return ray.get([call(engine) for engine in self.engines])
