"""A rollout engine in this process."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch

from openrlhf.backends.rollout import EngineOptions, engine_class
from openrlhf.user_file import program_hidden

ResultT = TypeVar("ResultT")

TIMEOUT = 900.0
"""Maximum time of a call to the engine in seconds. The start of an engine may compile kernels."""


class LocalEngine:
    """A rollout engine in this process, or a worker around one. It has the methods of `EngineClient`, through
    which a trainer controls weight syncs."""

    num_engines = 1

    def __init__(self, options: EngineOptions, build: Callable[[EngineOptions], Any] | None = None) -> None:
        """`build`: builds the worker; None: the engine alone."""
        kind = engine_class(options)
        os.environ.update(kind.environment(options))
        self.version, self.workers_per_engine, self.ends_with_first = 0, options.num_workers, False
        self.failures: dict[int, str] = {}
        self.dead: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine = self.call(_made(build or kind, options))
        free = None
        if options.on_gpu:
            left, total = torch.cuda.mem_get_info()
            free = left / total
        with program_hidden():  # from the processes that vLLM spawns on a GPU
            self.call(self.engine.start(free))

    def call(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Runs a coroutine of the engine and returns its result. Raises TimeoutError after `TIMEOUT`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT)

    def close(self) -> None:
        self.engine.shutdown()
        self._end_loop()

    def _end_loop(self) -> None:
        self.call(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT)
        self._loop.close()

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.call(self.engine.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self.call(self.engine.start_weight_update())

    def update_weights(self, update_info: dict | list[dict]) -> None:
        self.call(self.engine.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call(
            self.engine.finish_weight_update(str(self.version) if weight_version is None else weight_version)
        )

    def checksums(self) -> dict[int, list[int]]:
        return {0: self.call(self.engine.loaded_checksums())}


async def _made(build: Callable[[EngineOptions], Any], options: EngineOptions) -> Any:
    """Builds an engine in the event loop in which it will run."""
    return build(options)
