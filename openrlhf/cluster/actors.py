"""What Ray adds to the classes whose objects live in its actors: a place, and the environment of the run."""

from collections.abc import Mapping
from typing import Any, TypeVar

import ray

from openrlhf.backends.distributed import free_port
from openrlhf.cluster import environment, folder
from openrlhf.config.ppo import PPOConfig
from openrlhf.device import DEVICE_TYPE, visible_index
from openrlhf.mesh import Mesh
from openrlhf.training.worker import Worker
from openrlhf.user_file import UserFiles

WorkerT = TypeVar("WorkerT", bound=Worker)


class RankActor:
    """Mixed into the class of a worker: one rank as an actor."""

    def __init__(
        self, config: PPOConfig, rank: int, mesh: Mesh, files: UserFiles, private: Mapping[str, str]
    ) -> None:
        """`files`: those of `config.references`; `private`: see environment.py."""
        folder.enter()
        environment.take(private)
        place: dict[str, Any] = {}
        if DEVICE_TYPE == "cuda":
            place = {"local_rank": visible_index(ray.get_gpu_ids()[0]), "local_size": gpus_of_node()}
        config = config.with_references(files.here)
        super().__init__(config, rank, mesh, **place)  # pyrefly: ignore[bad-argument-count]  of the worker

    def address(self) -> tuple[str, int]:
        """Where the other ranks, or the engines, can meet this one."""
        return ray.util.get_node_ip_address(), free_port()


def actor_class(worker_class: type[WorkerT]) -> type[WorkerT]:
    """Returns the class of actors that hold a `worker_class` each. Ray gives their processes its name."""
    return type(worker_class.__name__, (RankActor, worker_class), {})


def gpus_of_node() -> int:
    """Of the node that this process runs on, whoever uses them."""
    here = ray.get_runtime_context().get_node_id()
    return next(int(node["Resources"].get("GPU", 1)) for node in ray.nodes() if node["NodeID"] == here)
