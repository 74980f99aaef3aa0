"""What runs inside a Ray actor. Plain classes: cluster/group.py and cluster/rollout.py wrap and call them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

import ray
from torch import Tensor

from openrlhf.algos.balance import pack_to_budget
from openrlhf.config.ppo import PPOConfig
from openrlhf.device import DEVICE_TYPE
from openrlhf.engine.deepspeed_engine import DeepSpeedEngine, FrozenModel
from openrlhf.engine.distributed import free_port, init_distributed, release_cached_memory
from openrlhf.engine.weight_sync import EngineClient, WeightSender
from openrlhf.models.loading import load_causal_lm, load_tokenizer
from openrlhf.models.policy import PolicyModel
from openrlhf.objectives.actor import ActorObjective
from openrlhf.types import Experience, ExperienceRow, Metrics, PackedRow, Sample

ModelT = TypeVar("ModelT", DeepSpeedEngine, FrozenModel)


class ModelWorker(Generic[ModelT]):
    """One rank of a model: joins the others and answers forwards."""

    model: ModelT
    """Since `start`."""

    def __init__(self, config: PPOConfig, rank: int, world_size: int) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size

    def address(self) -> tuple[str, int]:
        """Where the other ranks, or the engines, can meet this one."""
        return ray.util.get_node_ip_address(), free_port()

    def join(self, address: str, port: int) -> None:
        # Ray shows each worker its own GPU as number 0, unless it is told to show all.
        sees_all = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in os.environ and DEVICE_TYPE == "cuda"
        local_rank = ray.get_gpu_ids()[0] if sees_all else 0 if DEVICE_TYPE == "cuda" else self.rank
        os.environ |= {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(int(local_rank)),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        init_distributed()

    def forward(self, samples: Sequence[Sample]) -> list[Tensor]:
        """The log-probs of each sample's actions, (A,) each."""
        rollout, train = self.config.rollout, self.config.train
        groups = row_groups(
            [s.length for s in samples],
            max_tokens=self.config.rollout_tokens_per_gpu if train.dynamic_batch_enable else None,
            max_sequences=rollout.micro_batch_size,
        )
        rows = [PackedRow.of([samples[i] for i in group]) for group in groups]
        read = partial(_log_probs, temperature=rollout.temperature)
        outputs: dict[int, Tensor] = {}
        for group, log_probs in zip(groups, self.model.forward(rows, read), strict=True):
            parts = log_probs.split([samples[i].num_actions for i in group])
            for i, part in zip(group, parts, strict=True):
                outputs[i] = part
        return [outputs[i] for i in range(len(samples))]

    def build_model(self, path: str, flag: str) -> PolicyModel:
        ds = self.config.ds
        return PolicyModel(
            load_causal_lm(
                path,
                flag=flag,
                dtype=ds.param_dtype,
                attention=ds.attn_implementation,
                experts=ds.experts_implementation,
            )
        )


class FrozenWorker(ModelWorker[FrozenModel]):
    """The reference model, or a teacher."""

    def start(self, address: str, port: int, path: str, flag: str, offload: bool) -> None:
        self.join(address, port)
        self.model = FrozenModel(partial(self.build_model, path, flag), ds=self.config.ds, offload=offload)


class PolicyWorker(ModelWorker[DeepSpeedEngine]):
    def start(self, address: str, port: int, total_steps: int) -> None:
        self.join(address, port)
        actor = self.config.actor
        self.model = DeepSpeedEngine(
            partial(self.build_model, actor.model_name_or_path, "--actor.model_name_or_path"),
            optim=actor,
            ds=self.config.ds,
            total_steps=total_steps,
            gradient_checkpointing=actor.gradient_checkpointing_enable,
            reentrant=actor.gradient_checkpointing_reentrant,
        )
        self.offload()

    def update(
        self, experiences: Sequence[Experience], windows: Sequence[Sequence[int]], kl_coef: float
    ) -> list[Metrics]:
        """One optimizer step for each window; a window lists the experiences that are this rank's share of a
        batch."""
        config = self.config
        objective = ActorObjective.from_config(config.actor, config.algo, config.rollout.temperature, kl_coef)
        with self._optimizer_present():
            return [
                self.model.train_step(self._rows([experiences[i] for i in window]), objective)
                for window in windows
            ]

    def open_weight_sync(
        self, client: EngineClient, backend: str, address: str, port: int, num_workers: int
    ) -> None:
        self.sender = WeightSender(
            self.model,
            client,
            backend=backend,
            address=address,
            port=port,
            num_workers=num_workers,
            rank=self.rank,
        )

    def send_weights(self, version: int) -> None:
        self.sender.send(version)
        release_cached_memory()

    def save_checkpoint(self, tag: str, state: dict) -> None:
        with self._optimizer_present():
            self.model.save_checkpoint(self._checkpoint_folder, tag, state)

    def load_checkpoint(self, tag: str) -> dict:
        with self._optimizer_present():
            return self.model.load_checkpoint(self._checkpoint_folder, tag)

    def export(self, folder: str) -> None:
        self.model.export(folder)
        if self.rank == 0:
            load_tokenizer(
                self.config.actor.model_name_or_path,
                flag="--actor.model_name_or_path",
                use_fast=not self.config.data.disable_fast_tokenizer,
                chat_template=self.config.data.tokenizer_chat_template,
            ).save_pretrained(folder)

    def offload(self) -> None:
        """With `--ds.enable_sleep`: optimizer state to the CPU, so that engines have the GPU's memory."""
        if self.config.ds.enable_sleep:
            self.model.offload()
            release_cached_memory()

    @contextmanager
    def _optimizer_present(self) -> Iterator[None]:
        if self.config.ds.enable_sleep:
            self.model.reload()
        yield
        self.offload()

    @property
    def _checkpoint_folder(self) -> str:
        return f"{self.config.ckpt.path}/_actor"

    def _rows(self, experiences: Sequence[Experience]) -> list[ExperienceRow]:
        train = self.config.train
        groups = row_groups(
            [e.sample.length for e in experiences],
            max_tokens=train.max_tokens_per_gpu if train.dynamic_batch_enable else None,
            max_sequences=train.micro_batch_size,
        )
        return [ExperienceRow.of([experiences[i] for i in group]) for group in groups]


def row_groups(lengths: Sequence[int], *, max_tokens: int | None, max_sequences: int) -> list[list[int]]:
    """Which sequences share a row: as many as fit `max_tokens`, or `max_sequences` where that is None."""
    if max_tokens is not None:
        return pack_to_budget(lengths, max_tokens)
    return [
        list(range(i, min(i + max_sequences, len(lengths)))) for i in range(0, len(lengths), max_sequences)
    ]


def _log_probs(model, row: PackedRow, temperature: float) -> Tensor:
    return model(row, temperature=temperature).log_probs
