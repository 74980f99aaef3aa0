"""The work of one rank of a model in reinforcement learning: joining its group, loading and forward passes.

cluster/rank_groups.py runs a rank in a Ray actor; this module does not depend on Ray. The ranks of
policy and critic are in trained_worker.py.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from openrlhf import heap
from openrlhf.backends.build import build_frozen
from openrlhf.backends.distributed import (
    ProcessMesh,
    init_distributed,
    release_cached_memory,
    seed_everything,
)
from openrlhf.backends.model_rank import FrozenRank, TrainedRank
from openrlhf.backends.offload import DeviceMemory
from openrlhf.backends.peak_memory import PeakMemory, Peaks
from openrlhf.config.ppo import REWARD_FLAG, PPOConfig
from openrlhf.data.packing import pack_to_budget
from openrlhf.data.related import identities, rows_of_related
from openrlhf.mesh import Mesh
from openrlhf.models.backbone import RowModel, get_row_layout
from openrlhf.models.configurations import find_max_length, load_config
from openrlhf.models.ends import stop_token_ids
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import score_statistics
from openrlhf.models.tokenizers import load_run_tokenizer, load_tokenizer
from openrlhf.rewards.models import RewardReader
from openrlhf.rows import PackedRow
from openrlhf.training.models import load_language_model, load_reward_model
from openrlhf.types import Batch, Trajectory

ModelT = TypeVar("ModelT", TrainedRank, FrozenRank)

PHASES = {
    **dict.fromkeys(("forward", "forward_without_adapters"), "logprobs"),
    **dict.fromkeys(("update", "forward_backward", "optim_step"), "update"),
}
"""Maps a worker's method to the phase that its peak memory is booked under."""


class Worker:
    """One rank of a role (policy, critic, reference, teacher or reward models) in the role's process
    group."""

    def __init__(
        self,
        config: PPOConfig,
        rank: int,
        mesh: Mesh,
        *,
        local_rank: int | None = None,
        local_size: int | None = None,
    ) -> None:
        """`local_rank`: index of this rank's GPU on its node, which has `local_size` GPUs. None without
        GPUs."""
        heap.freeze()
        self.local_rank, self.local_size = local_rank, local_size
        self.config, self.rank, self.mesh = config, rank, ProcessMesh.of(mesh, rank)
        self.peaks = PeakMemory()

    def call(self, method: str, count: int, *arguments: Any, **named: Any) -> Any:
        """Calls `method` with the first `count` arguments. The others are the results of calls on the same
        devices, which nobody reads: Ray begins a call once all its arguments are there, so devices compute
        for one role at a time. They cannot be passed as a list, because Ray waits for no reference inside
        another value."""
        with self.peaks.during(PHASES[method]) if method in PHASES else nullcontext():
            return getattr(self, method)(*arguments[:count], **named)

    def peak_memory(self) -> Peaks:
        """Returns the peak memory of each phase since the previous call."""
        return self.peaks.take()

    def join(self, address: str, port: int) -> None:
        """Joins the process group at this address, which rank 0's `RankActor.address` has returned."""
        os.environ |= {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank if self.local_rank is None else self.local_rank),
            "WORLD_SIZE": str(self.mesh.size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        if self.local_size is not None:
            os.environ["LOCAL_WORLD_SIZE"] = str(self.local_size)
        init_distributed(timeout_minutes=self.config.train.rank_timeout / 60 + 1)
        self.mesh = ProcessMesh.joined(sequence=self.mesh.sequence, tensor=self.mesh.tensor)
        seed_everything(self.config.train.seed, self.config.train.full_determinism_enable)

    def frozen(self, build: Callable[[], RowModel], offload: bool) -> FrozenRank:
        """Loads a model that is not trained. `offload`: keep it on the CPU between forward passes."""
        config = self.config
        return build_frozen(
            build, backend=config.train.backend, ds=config.ds, offload=offload, mesh=self.mesh
        )

    def memory(self) -> DeviceMemory:
        """Returns the memory in use on this rank's device, without cached blocks."""
        release_cached_memory()
        return DeviceMemory.now()

    def row_budget(self, tokens_per_gpu: int) -> int | None:
        """Returns the token budget of a packed row under dynamic batching, else None."""
        return tokens_per_gpu * self.mesh.sequence if self.config.train.dynamic_batch_enable else None

    def row_groups(self, lengths: Sequence[int], token_ids: np.ndarray | None = None) -> list[list[int]]:
        """Groups sequences of these lengths into rows of a forward pass without gradients. `token_ids`: see
        the function `row_groups`."""
        config = self.config
        return row_groups(
            lengths,
            token_ids,
            max_tokens=self.row_budget(config.rollout_tokens_per_gpu),
            max_sequences=config.rollout.micro_batch_size,
        )


class ModelWorker(Worker, Generic[ModelT]):
    """One rank of a model with forward passes: a language model with log-probs, a critic with values."""

    model: ModelT
    """The engine around the model. Set by `start`."""

    def identities(self, batch: Batch) -> np.ndarray:
        """Returns a number for each token of the batch; see the function `identities`."""
        replays = get_row_layout(self.model.module.model).replay is not None
        routing = batch.routing if replays else None
        return identities(batch.token_ids, batch.lengths, images=batch.images, routing=routing)

    def forward(self, batch: Batch) -> np.ndarray:
        """Returns the results of `read` for the actions of the batch, (A,)."""
        token_ids = self.identities(batch) if self.model.shares_prefixes else None
        groups = self.row_groups(batch.lengths.tolist(), token_ids)
        rows = [PackedRow.from_batch(batch.select(group)) for group in groups]
        answers = [answer.numpy() for answer in self.model.forward(rows, self.read)]
        release_cached_memory()
        return batch.put_together(groups, answers)

    def read(self, model: Callable, row: PackedRow) -> Tensor:
        """Computes one value for each action of a row, (A,): here its log-prob."""
        return model(row, temperature=self.config.rollout.temperature).log_probs

    def build_model(self, path: str, flag: str) -> RowModel:
        return PolicyModel(load_language_model(self.config, path, flag))


class FrozenWorker(ModelWorker[FrozenRank]):
    """The reference model, or a teacher."""

    def start(self, address: str, port: int, path: str, flag: str, offload: bool) -> None:
        self.join(address, port)
        build = partial(self.build_model, path, flag)
        self.model = self.frozen(build, offload)


class RewardWorker(Worker):
    """One rank of the reward models, which share their ranks."""

    def start(self, address: str, port: int) -> None:
        self.join(address, port)
        config = self.config
        policy = load_run_tokenizer(config)
        stops = stop_token_ids(config.actor.model_name_or_path, policy)
        self.models, self.readers, self.statistics = [], [], []
        for path in config.reward.models:
            build = partial(load_reward_model, config, path, REWARD_FLAG, trained=True)
            self.models.append(self.frozen(build, config.reward.offload))
            own = load_tokenizer(path, flag=REWARD_FLAG)
            model_config = load_config(path, REWARD_FLAG)
            room = find_max_length(model_config)
            self.readers.append(RewardReader(policy, own, stop_token_ids=stops, max_len=room))
            normalize = config.reward.normalize_enable
            self.statistics.append(score_statistics(model_config, path) if normalize else (0.0, 1.0))

    def forward(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Returns the score of each trajectory by each of the M models, (B, M)."""
        scores = []
        for model, reader, (mean, std) in zip(self.models, self.readers, self.statistics, strict=True):
            samples = [reader(t) for t in trajectories]
            shares = samples and model.shares_prefixes
            lengths = [s.length for s in samples]
            token_ids = None
            if shares:
                ids, images = np.concatenate([s.token_ids for s in samples]), [s.images for s in samples]
                token_ids = identities(ids, lengths, images=images)
            groups = self.row_groups(lengths, token_ids)
            rows = [PackedRow.of([samples[i] for i in group]) for group in groups if group]
            answers = model.forward(rows or [PackedRow.empty()], lambda model, row: model(row))
            order = [i for group in groups for i in group]
            of_model = np.empty(len(samples), np.float32)
            of_model[order] = (torch.cat(answers) - mean) / std
            scores.append(of_model)
        release_cached_memory()
        return np.stack(scores, axis=1)


def row_groups(
    lengths: Sequence[int],
    token_ids: np.ndarray | None = None,
    *,
    max_tokens: int | None,
    max_sequences: int,
) -> list[list[int]]:
    """Groups sequences into rows of at most `max_tokens` tokens or, if that is None, of `max_sequences`
    sequences. Returns one empty row if there are no sequences. With `token_ids` sequences with common
    prefixes are side by side, see `rows_of_related`."""
    if not lengths:
        return [[]]
    if token_ids is not None:
        rows = rows_of_related(token_ids, lengths, max_tokens=max_tokens, max_sequences=max_sequences)
        if rows is not None:
            return rows
    if max_tokens is not None:
        return pack_to_budget(lengths, max_tokens)
    return [
        list(range(i, min(i + max_sequences, len(lengths)))) for i in range(0, len(lengths), max_sequences)
    ]
