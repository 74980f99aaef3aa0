"""All ranks of a model: implements the model interfaces of backends/base.py with Ray actors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import ray
from ray.actor import ActorHandle
from torch import Tensor

from openrlhf.backends.offload import DeviceMemory
from openrlhf.backends.weight_sync.client import EngineClient
from openrlhf.backends.weight_sync.stored_weights import Probe, WeightFingerprint
from openrlhf.cluster import environment
from openrlhf.cluster.actors import actor_class
from openrlhf.cluster.in_process import InProcess
from openrlhf.cluster.pending import Gathered, Handle, actor_names, first, results
from openrlhf.cluster.placement import Bundles
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.packing import partition
from openrlhf.data.related import identities, parts_of_related
from openrlhf.rewards.models import add_model_rewards, read_by_models, short_names
from openrlhf.training.schedule import mean_metrics
from openrlhf.training.trained_worker import CriticWorker, Learned, Loss, PolicyWorker, TrainedWorker
from openrlhf.training.worker import FrozenWorker, RewardWorker, Worker
from openrlhf.types import Batch, Metrics, PromptGroup, Schedule, Updated
from openrlhf.user_file import UserFiles

WorkerT = TypeVar("WorkerT", bound=Worker)
AnswerT = TypeVar("AnswerT")
TrainedT = TypeVar("TrainedT", bound=TrainedWorker)


class RankGroup(Generic[WorkerT]):
    """All ranks of one model."""

    worker_class: type[WorkerT]
    replays_routing = False
    """True if ranks replay the batch's routing of experts, and therefore receive it."""

    def __init__(self, config: PPOConfig, bundles: Bundles | InProcess) -> None:
        """Creates the ranks' processes; `start` loads the model."""
        self.config, self.bundles, self.mesh = config, bundles, bundles.mesh
        if isinstance(bundles, InProcess):
            self.workers: list[Handle] = bundles.create(self.worker_class, config)
            return
        files = UserFiles.of(*config.references.values())
        self.workers = [
            ray.remote(actor_class(self.worker_class))
            .options(**bundles.options(rank))
            .remote(config, rank, self.mesh, files, environment.private())
            for rank in range(self.mesh.size)
        ]
        role = self.worker_class.__name__.removesuffix("Worker").lower()
        actor_names.update({w._actor_id.hex(): f"rank {i} of {role}" for i, w in enumerate(self.workers)})

    def start(self, *arguments: Any) -> Gathered[None]:
        """Loads the model. `arguments`: those of the workers' `start` after the meeting point."""
        address, port = self.meeting_point()
        return self.on_all(lambda worker: worker.start.remote(address, port, *arguments))

    @property
    def data_parallel_size(self) -> int:
        return self.mesh.data

    def forward(self, batch: Batch, method: str = "forward") -> Gathered[np.ndarray]:
        """Returns the model's output for each action, (A,). `method`: the worker method that computes it."""
        batch = replace(batch, likely=None)  # only the policy's update reads them
        if self.config.ds.share_prefixes == "false":
            ranks = partition(batch.lengths.tolist(), self.data_parallel_size)
        else:
            routing = batch.routing if self.replays_routing else None
            token_ids = identities(batch.token_ids, batch.lengths, images=batch.images, routing=routing)
            ranks = parts_of_related(token_ids, batch.lengths.tolist(), self.data_parallel_size)
        refs = self.run(method, [(self.select(batch, sequences),) for sequences in ranks])
        return Gathered(refs, lambda answers: batch.put_together(ranks, self.select_leaders(answers)))

    def select(self, batch: Batch, sequences: Sequence[int]) -> Batch:
        """Returns these sequences of the batch, with the columns that a rank reads."""
        own = batch if self.replays_routing else replace(batch, likely=None, routing=None)
        return own.select(sequences)

    def select_leaders(self, answers: Sequence[AnswerT]) -> list[AnswerT]:
        """Returns the answers of one rank per data-parallel group, out of those of all ranks."""
        return [answers[rank] for rank in self.mesh.leaders]

    def run(self, method: str, arguments: Sequence[tuple], **named: Any) -> list[ray.ObjectRef]:
        """Calls `method` on every rank with the arguments of its data-parallel rank. The calls run after the
        current calls on the same devices."""
        own = [arguments[self.mesh.coordinates(rank).data] for rank in range(self.mesh.size)]
        return self.bundles.devices.run(
            lambda after: [
                worker.call.remote(method, len(args), *args, *after, **named)
                for worker, args in zip(self.workers, own, strict=True)
            ]
        )

    def on_all(self, call: Callable[[ActorHandle], ray.ObjectRef]) -> Gathered:
        """Runs `call` on every rank. The result is that of rank 0."""
        return Gathered([call(worker) for worker in self.workers], first)

    def memory(self) -> list[DeviceMemory]:
        """Returns the device memory of every rank."""
        return results([worker.memory.remote() for worker in self.workers])

    def meeting_point(self) -> tuple[str, int]:
        """Returns an IP address and a free port of rank 0, at which the ranks form their process group."""
        return results([self.workers[0].address.remote()])[0]


class FrozenRanks(RankGroup[FrozenWorker]):
    """The reference model, or a teacher."""

    worker_class = FrozenWorker


class RewardRanks(RankGroup[RewardWorker]):
    """All reward models of a run. Each worker has a rank of every model."""

    worker_class = RewardWorker

    def score(self, groups: Sequence[PromptGroup]) -> list[PromptGroup]:
        """Scores groups with the reward models. Returns the groups with the scores added to the episodes'
        rewards."""
        read = [
            replace(t, likely=None, routing=None)
            for group in groups
            for t in read_by_models(group.trajectories)
        ]
        ranks = partition([len(t.token_ids) for t in read], self.data_parallel_size)
        refs = self.run("forward", [([read[i] for i in sequences],) for sequences in ranks])
        scores: dict[int, np.ndarray] = {}
        for sequences, rows in zip(ranks, self.select_leaders(results(refs)), strict=True):
            scores |= dict(zip(sequences, rows, strict=True))
        in_order = (scores[i] for i in range(len(read)))
        return [self._add(group, in_order) for group in groups]

    def _add(self, group: PromptGroup, scores: Iterator[np.ndarray]) -> PromptGroup:
        reward, of_tasks = self.config.reward, self.config.task_values("reward")
        scored = add_model_rewards(
            group.trajectories,
            [next(scores) for _ in read_by_models(group.trajectories)],
            names=short_names(reward.models),
            weights=reward.model_weights or [1.0] * len(reward.models),
            has_function=bool(reward.urls) or group.prompt.source in of_tasks,
        )
        return replace(group, trajectories=scored)


class TrainedRanks(RankGroup[TrainedT]):
    """The policy or the critic."""

    def __init__(self, config: PPOConfig, bundles: Bundles | InProcess) -> None:
        super().__init__(config, bundles)
        self.num_updates = 0
        """Number of `update` calls so far, which is the seed of the samples' order."""

    def start(self, *arguments: Any) -> Gathered[None]:
        """Loads the model, after models on the same devices. `arguments`: those of the workers' `start` after
        the meeting point, first the optimizer steps of the whole run."""
        arguments = *self.meeting_point(), *arguments
        return Gathered(self.run("start", [arguments] * self.mesh.data), first)

    def update(
        self, batch: Batch, schedule: Schedule, kl_coef: float, is_fresh: bool = True
    ) -> Gathered[Updated]:
        """Takes the optimizer steps of `schedule` on the batch. Each rank receives only its own sequences.
        `is_fresh`: nothing was trained since the models have read the batch.
        Returns the metrics and, for a policy's batch without log-probs, the log-probs of the first step, see
        `Updated`."""
        self.num_updates += 1
        arguments = []
        for rank in range(self.data_parallel_size):
            mini_batches = [step[rank] for step in schedule]
            sequences = sorted({i for mini_batch in mini_batches for i in mini_batch})
            position = {i: k for k, i in enumerate(sequences)}
            own = [[position[i] for i in mini_batch] for mini_batch in mini_batches]
            arguments.append((self.select(batch, sequences), own, kl_coef, is_fresh))

        def combine(results: list[Learned]) -> Updated:
            steps, parts = zip(*self.select_leaders(results), strict=True)
            log_probs = None if parts[0] is None else np.concatenate(parts)
            return Updated(
                mean_metrics(steps[0]), [i for mini_batch in schedule[0] for i in mini_batch], log_probs
            )

        return Gathered(self.run("update", arguments), combine)

    def forward_backward(self, *streams: tuple[Batch, Loss], kl_coef: float = 0.0) -> Gathered[Metrics]:
        """Adds the gradients of the losses of whole batches to those since the last optimizer step. Each loss
        is divided by the totals of its own batch."""
        parts = [partition(batch.lengths.tolist(), self.data_parallel_size) for batch, _ in streams]
        arguments = [
            tuple(
                (self.select(batch, ranks[rank]), loss)
                for (batch, loss), ranks in zip(streams, parts, strict=True)
            )
            for rank in range(self.data_parallel_size)
        ]
        return Gathered(self.run("forward_backward", arguments, kl_coef=kl_coef), first)

    def optim_step(self) -> Gathered[Metrics]:
        """Takes one optimizer step with the gradients since the last one."""
        return Gathered(self.run("optim_step", [()] * self.data_parallel_size), first)

    def save_checkpoint(self, tag: str, state: dict) -> Gathered[None]:
        state = state | {"num_updates": self.num_updates}
        self.bundles.devices.release()
        return self.on_all(lambda worker: worker.save_checkpoint.remote(tag, state))

    def has_written(self) -> Gathered[bool]:
        return Gathered([worker.has_written.remote() for worker in self.workers], all)

    def finish_checkpoint(self) -> Gathered[None]:
        return self.on_all(lambda worker: worker.finish_checkpoint.remote())

    def load_checkpoint(self, tag: str) -> Gathered[dict]:
        def remember(results: list[dict]) -> dict:
            self.num_updates = results[0]["num_updates"]
            return results[0]

        self.bundles.devices.release()
        return Gathered([w.load_checkpoint.remote(tag) for w in self.workers], remember)

    def export(self, folder: str) -> Gathered[None]:
        self.bundles.devices.release()
        return self.on_all(lambda worker: worker.export.remote(folder))

    def memory_of_rows(self) -> str:
        """Describes the estimated memory of a rank. Raises UsageError if the rank has less."""
        return results([self.workers[0].memory_of_rows.remote()])[0]


class PolicyRanks(TrainedRanks[PolicyWorker]):
    """All ranks of the policy."""

    worker_class = PolicyWorker
    replays_routing = True

    def open_weight_sync(self, client: EngineClient, backend: str) -> Gathered[None]:
        address, port = self.meeting_point()
        return self.on_all(lambda worker: worker.open_weight_sync.remote(client, backend, address, port))

    def weight_bytes(self) -> int:
        """Returns the bytes that `send_weights` sends."""
        return results([self.workers[0].weight_bytes.remote()])[0]

    def send_weights(
        self, version: int, probe: Probe | None = None, adapter_seed: int | None = None
    ) -> Gathered[Tensor | None]:
        """Sends the weights to the engines. Returns the log-probs of the probe's tokens after the first, (L -
        1,), at temperature 1; None without a probe. `adapter_seed`: send a random adapter, see
        `TrainedRank.random_adapter`."""
        return self.on_all(lambda worker: worker.send_weights.remote(version, probe, adapter_seed))

    def weight_fingerprints(self) -> Gathered[dict[str, WeightFingerprint]]:
        """Returns fingerprints of the weights that were sent to engines: of the base weights if adapters are
        sent separately."""
        return self.on_all(lambda worker: worker.weight_fingerprints.remote())


class AdapterDisabledReference:
    """The reference model of a policy with LoRA adapters: the policy with its adapters disabled."""

    def __init__(self, policy: PolicyRanks) -> None:
        self.policy = policy

    def forward(self, batch: Batch) -> Gathered[np.ndarray]:
        return self.policy.forward(replace(batch, routing=None), "forward_without_adapters")


class CriticRanks(TrainedRanks[CriticWorker]):
    """All ranks of the critic."""

    worker_class = CriticWorker
