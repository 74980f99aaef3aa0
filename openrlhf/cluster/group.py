"""Models of many ranks, as the trainer sees them: engine/interfaces.py over Ray actors."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.actor import ActorHandle
from torch import Tensor

from openrlhf.algos.balance import partition
from openrlhf.cluster.engine_client import RayEngineClient
from openrlhf.cluster.pending import Gathered, first
from openrlhf.cluster.placement import Bundles
from openrlhf.cluster.worker import (
    CriticWorker,
    FrozenWorker,
    PolicyWorker,
    RewardWorker,
    TrainedWorker,
    Worker,
)
from openrlhf.config.ppo import PPOConfig
from openrlhf.rewards.models import add_model_rewards, short_names
from openrlhf.trainer.schedule import mean_metrics, training_schedule
from openrlhf.types import Experience, Metrics, Sample, Trajectory

WorkerT = TypeVar("WorkerT", bound=Worker)
ItemT = TypeVar("ItemT")
TrainedT = TypeVar("TrainedT", bound=TrainedWorker)


class Group(Generic[WorkerT]):
    """All ranks of one model."""

    def __init__(self, worker_class: type[WorkerT], config: PPOConfig, bundles: Bundles) -> None:
        """Creates the ranks' processes; `start` loads the model."""
        self.config, self.bundles, self.mesh = config, bundles, bundles.mesh
        self.workers: list[Any] = [  # actor handles, whose methods Ray does not type
            ray.remote(worker_class).options(**bundles.options(rank)).remote(config, rank, self.mesh)
            for rank in range(self.mesh.size)
        ]

    def forward(self, samples: Sequence[Sample]) -> Gathered[list[Tensor]]:
        return self.ask(samples, [s.length for s in samples], spare=samples[0].without_actions())

    def ask(self, items: Sequence[ItemT], lengths: Sequence[int], spare: ItemT) -> Gathered[list[Tensor]]:
        """What the ranks' `forward` says of each item. `spare`: for a rank that gets none."""
        shares = partition(lengths, self.mesh.data)
        refs = self.run("forward", [([items[i] for i in share] or [spare],) for share in shares])

        def in_order(results: list[list[Tensor]]) -> list[Tensor]:
            outputs: dict[int, Tensor] = {}
            for share, leader in zip(shares, self.mesh.leaders, strict=True):
                for i, tensor in zip(share, results[leader], strict=False):
                    outputs[i] = tensor
            return [outputs[i] for i in range(len(items))]

        return Gathered(refs, in_order)

    def run(self, method: str, arguments: Sequence[tuple]) -> list[ray.ObjectRef]:
        """`method` on every rank with the arguments of its data parallel rank, once what shares its devices
        is done."""
        own = [arguments[self.mesh.coordinates(rank).data] for rank in range(self.mesh.size)]
        return self.bundles.devices.run(
            lambda after: [
                worker.call.remote(method, len(args), *args, *after)
                for worker, args in zip(self.workers, own, strict=True)
            ]
        )

    def on_all(self, call: Callable[[ActorHandle], ray.ObjectRef]) -> Gathered:
        """`call` on every rank; the answer is rank 0's."""
        return Gathered([call(worker) for worker in self.workers], first)

    def meeting_point(self) -> tuple[str, int]:
        return ray.get(self.workers[0].address.remote())


class FrozenGroup(Group[FrozenWorker]):
    """The reference model, or a teacher."""

    def __init__(self, config: PPOConfig, bundles: Bundles, *, path: str, flag: str, offload: bool) -> None:
        super().__init__(FrozenWorker, config, bundles)
        self.model = (path, flag, offload)

    def start(self) -> Gathered[None]:
        address, port = self.meeting_point()
        return self.on_all(lambda worker: worker.start.remote(address, port, *self.model))


class RewardGroup(Group[RewardWorker]):
    """All reward models of a run, together in the same workers."""

    def __init__(self, config: PPOConfig, bundles: Bundles) -> None:
        super().__init__(RewardWorker, config, bundles)

    def start(self) -> Gathered[None]:
        address, port = self.meeting_point()
        return self.on_all(lambda worker: worker.start.remote(address, port))

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same with what the models think of them in their rewards."""
        finished = [t for t in trajectories if t.ok]
        lengths = [len(t.token_ids) for t in finished]
        reward = self.config.reward
        return add_model_rewards(
            trajectories,
            self.ask(finished, lengths, spare=finished[0]).result() if finished else [],
            names=short_names(reward.models),
            weights=reward.model_weights or [1.0] * len(reward.models),
            has_function=bool(reward.urls),
        )


class TrainedGroup(Group[TrainedT]):
    """The policy or the critic."""

    def __init__(self, worker_class: type[TrainedT], config: PPOConfig, bundles: Bundles) -> None:
        super().__init__(worker_class, config, bundles)
        self.num_updates = 0
        """Calls of `update` so far: the address of each call's shuffle."""

    def start(self, total_steps: int, *more: Any) -> Gathered[None]:
        """`total_steps`: optimizer steps of the whole run; `more`: what else the workers' `start` takes."""
        address, port = self.meeting_point()
        return Gathered(self.run("start", [(address, port, total_steps, *more)] * self.mesh.data), first)

    def update(
        self, experiences: Sequence[Experience], num_batches: int, kl_coef: float
    ) -> Gathered[Metrics]:
        """`train.max_epochs` passes of `num_batches` optimizer steps; metrics are means over the steps."""
        train = self.config.train
        schedule = training_schedule(
            [e.sample.length for e in experiences],
            num_batches=num_batches,
            epochs=train.max_epochs,
            num_ranks=self.mesh.data,
            seed=(train.seed, self.num_updates),
        )
        self.num_updates += 1
        spare = experiences[0].without_actions()

        arguments = []
        for rank in range(self.mesh.data):
            windows = [step[rank] for step in schedule]
            mine = sorted({i for window in windows for i in window})
            position = {i: k for k, i in enumerate(mine)}
            shares = [[position[i] for i in window] or [len(mine)] for window in windows]
            arguments.append(([*(experiences[i] for i in mine), spare], shares, kl_coef))
        return Gathered(self.run("update", arguments), lambda results: mean_metrics(results[0]))

    def save_checkpoint(self, tag: str, state: dict) -> Gathered[None]:
        state = state | {"num_updates": self.num_updates}
        return self.on_all(lambda worker: worker.save_checkpoint.remote(tag, state))

    def load_checkpoint(self, tag: str) -> Gathered[dict]:
        def remember(results: list[dict]) -> dict:
            self.num_updates = results[0]["num_updates"]
            return results[0]

        return Gathered([w.load_checkpoint.remote(tag) for w in self.workers], remember)

    def export(self, folder: str) -> Gathered[None]:
        return self.on_all(lambda worker: worker.export.remote(folder))


class PolicyGroup(TrainedGroup[PolicyWorker]):
    def __init__(self, config: PPOConfig, bundles: Bundles) -> None:
        super().__init__(PolicyWorker, config, bundles)

    def open_weight_sync(self, client: RayEngineClient, backend: str) -> Gathered[None]:
        address, port = self.meeting_point()
        return self.on_all(
            lambda worker: worker.open_weight_sync.remote(client, backend, address, port, client.num_workers)
        )

    def probe(self, sample: Sample) -> Gathered[Tensor]:
        """(A,) log-probs of the sample's actions at temperature 1."""
        return Gathered(self.run("probe", [(sample,)] * self.mesh.data), first)

    def send_weights(self, version: int) -> Gathered[None]:
        return self.on_all(lambda worker: worker.send_weights.remote(version))


class CriticGroup(TrainedGroup[CriticWorker]):
    def __init__(self, config: PPOConfig, bundles: Bundles) -> None:
        super().__init__(CriticWorker, config, bundles)
