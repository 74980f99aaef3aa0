"""Ray actors of the trainer's ranks. An actor sets the run's environment and its device before it creates its
worker."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import ray

from openrlhf.backends.distributed import free_port
from openrlhf.backends.model_rank import ModelRank
from openrlhf.cluster import environment
from openrlhf.cluster.watchdog import Progress, start_heartbeat
from openrlhf.config.ppo import PPOConfig
from openrlhf.device import DEVICE_TYPE, visible_index
from openrlhf.mesh import Mesh
from openrlhf.training.worker import Worker
from openrlhf.user_file import UserFiles

WorkerT = TypeVar("WorkerT", bound=Worker)


class RankActor:
    """Mixin that turns a worker class into the actor of one rank."""

    num_calls, depth = 0, 0
    """Number of calls that have ended; number of those under way, one inside the other."""

    def __init__(
        self, config: PPOConfig, rank: int, mesh: Mesh, files: UserFiles, private: Mapping[str, str]
    ) -> None:
        """`files`: users' files that `config.references` names; `private`: secret variables, see
        environment.py."""
        environment.enter(private)
        place: dict[str, Any] = {}
        if DEVICE_TYPE == "cuda":
            place = {"local_rank": visible_index(ray.get_gpu_ids()[0]), "local_size": gpus_of_node()}
        config = config.with_references(files.here)
        super().__init__(config, rank, mesh, **place)  # pyrefly: ignore[bad-argument-count]  of the worker
        start_heartbeat(self.progress)

    def progress(self) -> Progress:
        """Returns the number of finished calls and rows, and whether a call is under way."""
        return self.num_calls + ModelRank.num_rows, self.depth > 0

    def address(self) -> tuple[str, int]:
        """Returns an IP address and a free port at which other ranks or engines can reach this rank."""
        return ray.util.get_node_ip_address(), free_port()


def actor_class(worker_class: type[WorkerT]) -> type[WorkerT]:
    """Returns an actor class around `worker_class` with the same name, which Ray shows as the name of the
    process."""
    calls = {
        name: call for name, call in inspect.getmembers(worker_class, inspect.isfunction) if name[0] != "_"
    }
    return type(
        worker_class.__name__,
        (RankActor, worker_class),
        {name: _counted(call) for name, call in calls.items()},
    )


def _counted(call: Callable) -> Callable:
    """Returns the method of a rank, counted while it runs."""

    @wraps(call)
    def counted(self: RankActor, *arguments: Any, **named: Any) -> Any:
        self.depth += 1
        try:
            return call(self, *arguments, **named)
        finally:
            self.depth -= 1
            self.num_calls += 1

    return counted


def gpus_of_node() -> int:
    """Returns the number of GPUs of this process's node, including those in use."""
    here = ray.get_runtime_context().get_node_id()
    return next(int(node["Resources"].get("GPU", 1)) for node in ray.nodes() if node["NodeID"] == here)
