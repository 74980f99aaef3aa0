"""Ranks in this process, for models of one rank: they need no Ray."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Self

from openrlhf.backends.distributed import free_port
from openrlhf.cluster.pending import Answer, Handle
from openrlhf.config.ppo import PPOConfig
from openrlhf.mesh import Mesh
from openrlhf.training.worker import Worker


class InProcess:
    """Takes the place of the bundles of a role. Calls run at once."""

    mesh = Mesh()

    @property
    def devices(self) -> Self:
        return self

    def create(self, worker_class: type[Worker], config: PPOConfig) -> list[Handle]:
        """Creates the only rank."""
        return [LocalHandle(worker_class(config, 0, self.mesh))]

    def run(self, call: Callable[[Sequence], list]) -> list:
        """Returns `call(())`: no other call is under way."""
        return call(())

    def release(self) -> None:
        """Does nothing: no call holds the devices."""


class LocalHandle:
    """Takes the place of the handle of an actor. Each method has `remote`, which returns an `Answer`."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    @property
    def address(self) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda: Answer(("127.0.0.1", free_port())))

    def __getattr__(self, name: str) -> SimpleNamespace:
        method = getattr(self.worker, name)

        def remote(*arguments: Any, **named: Any) -> Answer:
            return Answer(method(*arguments, **named))

        return SimpleNamespace(remote=remote)
