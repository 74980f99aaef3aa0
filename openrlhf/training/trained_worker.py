"""The work of one rank of the policy or the critic: updates, checkpoints, weight syncs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.mismatch import MERGED
from openrlhf.algorithms.policy_losses import PolicyLoss
from openrlhf.backends.base import Objective
from openrlhf.backends.build import build_engine
from openrlhf.backends.distributed import release_cached_memory
from openrlhf.backends.model_rank import TrainedRank
from openrlhf.backends.offload import offload_optimizer, optimizer_loaded
from openrlhf.backends.weight_sync.client import EngineClient
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.backends.weight_sync.stored_weights import Probe, WeightFingerprint, fingerprints
from openrlhf.checkpoint.folder import UNFINISHED
from openrlhf.config.ppo import ACTOR_FLAG, CRITIC_FLAG, ActorConfig, CriticConfig
from openrlhf.config.sections import OptimConfig
from openrlhf.data.batches import MiniBatches
from openrlhf.data.store import SampleStore
from openrlhf.device import own_bytes
from openrlhf.faults import fault
from openrlhf.files import exporting
from openrlhf.memory.rows import memory_of_rows
from openrlhf.models.backbone import RowModel, get_row_layout
from openrlhf.models.ends import stop_token_ids
from openrlhf.models.experts import freeze_routers
from openrlhf.models.lora import disabled_adapters, prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.models.router_replay import Replay
from openrlhf.models.saving import save_ends
from openrlhf.models.scorer import ValueModel
from openrlhf.models.tokenizers import load_run_tokenizer, saved_reader
from openrlhf.models.vision import freeze_vision
from openrlhf.observability.hooks.base import Hook, announce
from openrlhf.observability.hooks.load import attached
from openrlhf.rows import ExperienceRow, PackedRow, Sample
from openrlhf.training.models import load_language_model, load_reward_model
from openrlhf.training.objectives.balanced import BalancedObjective
from openrlhf.training.objectives.critic import CriticObjective
from openrlhf.training.objectives.policy import GivenGradient, PolicyObjective
from openrlhf.training.objectives.ptx import PTXObjective
from openrlhf.training.worker import ModelWorker, row_groups
from openrlhf.types import Batch, Metrics

Loss = str | type[PolicyLoss] | GivenGradient | None
"""The loss of a batch: a policy loss by its name or class; a gradient with respect to the log-probs; None:
the loss that the flags say."""


class TrainedWorker(ModelWorker[TrainedRank], ABC):
    """One rank of a model in training: the policy or the critic."""

    name: str
    """Name of the role, which is part of its checkpoint folder's name."""
    total_steps: int
    """Optimizer steps of the whole run. Set by `start`."""

    @cached_property
    def hooks(self) -> list[Hook]:
        """Hooks that installed packages attach to every rank that learns."""
        return attached("rank", self.config, worker=self)

    @property
    @abstractmethod
    def optim(self) -> OptimConfig:
        """Optimizer and schedule of the role."""

    @abstractmethod
    def objective(self, kl_coef: float, loss: Loss = None) -> Objective[ExperienceRow]:
        """Returns the objective of a `Loss`. Only a policy has losses other than its own."""

    def update(
        self, batch: Batch, mini_batches: Sequence[Sequence[int]], kl_coef: float, is_fresh: bool = True
    ) -> "Learned":
        """Takes one optimizer step for each mini-batch; a mini-batch lists the sequences of `batch` that this
        rank trains on in that step. `is_fresh`: the batch's log-probs and values are of the current weights,
        which hooks may check."""
        if is_fresh:
            announce(self.hooks, Hook.before_update, batch, mini_batches, kl_coef)
        return self.train_steps(batch, mini_batches, self.objective(kl_coef)), None

    def train_steps(
        self, batch: Batch, mini_batches: Sequence[Sequence[int]], objective: Objective[ExperienceRow]
    ) -> list[Metrics]:
        """Takes one optimizer step for each mini-batch, and returns the metrics of each."""
        with self._optimizer_present():
            return [self.train_step(self.rows(batch, mini_batch), objective) for mini_batch in mini_batches]

    def train_step(self, rows: Sequence[ExperienceRow], objective: Objective[ExperienceRow]) -> Metrics:
        metrics = self.model.train_step(rows, objective, *self.auxiliary_objectives())
        announce(self.hooks, Hook.after_step, self.model.steps, metrics)
        return metrics

    def forward_backward(self, *streams: tuple[Batch, Loss], kl_coef: float) -> Metrics:
        """Adds the gradients of the losses of these batches; see `TrainedRank.forward_backward`."""
        with self._optimizer_present():
            pairs = [
                (self.rows(batch, range(len(batch))), self.objective(kl_coef, loss))
                for batch, loss in streams
            ]
            return self.model.forward_backward(*pairs)

    def optim_step(self) -> Metrics:
        """Takes one optimizer step; see `TrainedRank.optim_step`."""
        with self._optimizer_present():
            return self.model.optim_step()

    def auxiliary_objectives(self) -> list[tuple[Sequence[PackedRow], Objective]]:
        """Returns the additional (rows, objective) pairs of the next optimizer step."""
        return []

    def save_checkpoint(self, tag: str, state: dict) -> None:
        with self._optimizer_present():
            folder, later = f"{self._checkpoint_folder}/{UNFINISHED}", self.config.ckpt.async_save
            self.model.save_checkpoint(folder, tag, state, later=later)

    def has_written(self) -> bool:
        return self.model.has_written

    def finish_checkpoint(self) -> None:
        self.model.finish_checkpoint()

    def load_checkpoint(self, tag: str) -> dict:
        with self._optimizer_present():
            return self.model.load_checkpoint(self._checkpoint_folder, tag)

    def memory_of_rows(self) -> str:
        """See `memory_of_rows` of memory/rows.py."""
        config = self.config
        estimate = partial(self.model.row_memory, with_entropy=bool(config.actor.entropy_coef))
        sharing = config.ds.ring_attn_size
        return memory_of_rows(estimate, config.train, config.data.max_len, sharing, own_bytes())

    def export(self, folder: str) -> None:
        with exporting(folder) if self.rank == 0 else nullcontext(folder) as made:
            self.model.export(str(made))
            if self.rank == 0:
                (_, path), tokenizer = self.config.trained_models["policy"], load_run_tokenizer(self.config)
                reader = saved_reader(tokenizer, path, images=self.config.reads_images)
                reader.save_pretrained(made)
                save_ends(made, path, stop_token_ids(path, tokenizer))

    def _engine(
        self,
        build_model: Callable[[], RowModel],
        total_steps: int,
        gradient_checkpointing: bool,
        ema_beta: float | None = None,
    ) -> TrainedRank:
        self.total_steps = total_steps
        fault("rank.load")
        return build_engine(
            build_model,
            backend=self.config.train.backend,
            optim=self.optim,
            ds=self.config.ds,
            total_steps=total_steps,
            gradient_checkpointing=gradient_checkpointing,
            reentrant=self.config.actor.gradient_checkpointing_reentrant,
            ema_beta=ema_beta if self.config.learns else None,
            skip_nonfinite=self.config.train.on_nonfinite == "skip_step",
            learns=self.config.learns,
            mesh=self.mesh,
        )

    def _optimizer_present(self) -> AbstractContextManager[None]:
        return optimizer_loaded(self.model, self.config.ds.enable_sleep)

    @property
    def _checkpoint_folder(self) -> str:
        return f"{self.config.ckpt.folder}/_{self.name}"

    def rows(self, batch: Batch, mini_batch: Sequence[int]) -> list[ExperienceRow]:
        """Returns the rows of the sequences of a mini-batch."""
        return [ExperienceRow.of(batch.select(group)) for group in self.groups(batch, mini_batch)]

    def groups(self, batch: Batch, mini_batch: Sequence[int]) -> list[list[int]]:
        """Groups the sequences of a mini-batch into rows."""
        train, of_mini_batch = self.config.train, batch.select(mini_batch)
        groups = row_groups(
            of_mini_batch.lengths.tolist(),
            self.identities(of_mini_batch) if self.model.trains_on_prefixes else None,
            max_tokens=self.row_budget(train.max_tokens_per_gpu),
            max_sequences=train.micro_batch_size,
        )
        return [[mini_batch[i] for i in group] for group in groups]


Learned = tuple[list[Metrics], np.ndarray | None]
"""A rank's result of an update: the metrics of each optimizer step, and the log-probs (A,) of its first
mini-batch before the update; None if the batch already had log-probs."""


class PolicyWorker(TrainedWorker):
    """One rank of the policy."""

    name = "actor"
    text_mini_batches: MiniBatches[PackedRow] | None = None
    """Pre-training texts of each optimizer step; None without actor.ptx_coef."""

    @property
    def optim(self) -> ActorConfig:
        return self.config.actor

    def start(self, address: str, port: int, total_steps: int, texts: SampleStore | None = None) -> None:
        self.join(address, port)
        actor = self.config.actor
        self.model = self._engine(
            partial(self.build_model, actor.model_name_or_path, ACTOR_FLAG),
            total_steps,
            actor.gradient_checkpointing_enable,
            ema_beta=self.config.train.ema_beta if self.config.train.enable_ema else None,
        )
        if texts is not None:
            self.text_mini_batches = self._build_mini_batches(texts)
        self._seek_texts()
        offload_optimizer(self.model, self.config.ds.enable_sleep)

    def build_model(self, path: str, flag: str) -> RowModel:
        ds = self.config.ds
        model = load_language_model(self.config, path, flag, in_4bit=ds.load_in_4bit)
        if self.config.algo.router_replay:
            get_row_layout(model).replay = Replay(model)
        if self.config.actor.freeze_visual_encoder:
            freeze_vision(model)
        if self.config.actor.freeze_moe_router:
            freeze_routers(model)
        return PolicyModel(prepare_for_training(model, ds))

    def forward_without_adapters(self, batch: Batch) -> np.ndarray:
        """Returns the log-probs (A,) of the model with its adapters disabled, which is the reference of LoRA
        runs."""
        with torch.no_grad(), disabled_adapters(self.model.module.model):
            return self.forward(batch)

    def objective(
        self, kl_coef: float, loss: Loss = None, seen: list[Tensor] | None = None
    ) -> Objective[ExperienceRow]:
        """`seen`: see `PolicyObjective`."""
        if isinstance(loss, GivenGradient):
            return balanced(loss, self.config.actor.aux_loss_coef, "policy")
        objective = PolicyObjective.from_config(self.config, kl_coef, seen)
        if loss is not None:
            objective = replace(objective, loss_type=loss)
        return balanced(objective, self.config.actor.aux_loss_coef, "policy")

    def update(
        self, batch: Batch, mini_batches: Sequence[Sequence[int]], kl_coef: float, is_fresh: bool = True
    ) -> Learned:
        """Updates the policy. If the batch has no log-probs, also returns the log-probs of the first
        mini-batch, from its forward passes, which run before the policy changes."""
        if is_fresh:
            announce(self.hooks, Hook.before_update, batch, mini_batches, kl_coef)
        seen: list[Tensor] = []
        steps = self.train_steps(batch, mini_batches, self.objective(kl_coef, seen=seen))
        first = batch.select(mini_batches[0])
        groups = self.groups(first, range(len(first)))
        log_probs = first.put_together(groups, [row.cpu().numpy() for row in seen[: len(groups)]])
        if (left := self.model.merged_fraction) is not None:
            steps = [metrics | {MERGED: left} for metrics in steps]
        if first.log_probs is None:
            return steps, log_probs
        step = self.model.steps - len(mini_batches) + 1
        if is_fresh:
            announce(self.hooks, Hook.first_pass, first.log_probs, log_probs, step)
        return steps, None

    def auxiliary_objectives(self) -> list[tuple[Sequence[PackedRow], Objective]]:
        if self.text_mini_batches is None:
            return []
        return [(next(self.text_rows), PTXObjective(coef=self.config.actor.ptx_coef))]

    def load_checkpoint(self, tag: str) -> dict:
        state = super().load_checkpoint(tag)
        self._seek_texts()
        return state

    def _build_mini_batches(self, texts: SampleStore) -> MiniBatches[PackedRow]:
        train = self.config.train
        return MiniBatches(
            texts,
            PackedRow.of,
            batch_size=train.batch_size,
            micro_batch_size=None if train.dynamic_batch_enable else train.micro_batch_size,
            max_tokens=self.row_budget(train.max_tokens_per_gpu),
            data_rank=self.mesh.data_rank,
            data_size=self.mesh.data,
            seed=train.seed,
            shuffle=False,
            shares_prefixes=self.model.trains_on_prefixes and not self.config.reads_images,
        )

    def _seek_texts(self) -> None:
        if self.text_mini_batches is not None:
            self.text_rows = self.text_mini_batches.endless(self.model.steps)

    def open_weight_sync(self, client: EngineClient, backend: str, address: str, port: int) -> None:
        vllm = self.config.vllm
        self.sender = WeightSender(
            self.model,
            client,
            backend=backend,
            address=address,
            port=port,
            rank=self.rank,
            lora_sync=vllm.lora_sync if self.config.ds.lora.rank > 0 else "merged",
            bucket_bytes=None if vllm.sync_bucket_mb is None else vllm.sync_bucket_mb << 20,
        )

    def weight_bytes(self) -> int:
        """Returns the bytes that a weight sync sends."""
        return sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in self.model.weight_metadata())

    def send_weights(
        self, version: int, probe: Probe | None, adapter_seed: int | None = None
    ) -> Tensor | None:
        """Sends the weights to the engines; see `PolicyRanks.send_weights`."""
        adapter = nullcontext() if adapter_seed is None else self.model.random_adapter(adapter_seed)
        with self.peaks.during("sync"), adapter:
            self.model.check_finite(states=False)
            fault("sync.send")
            log_probs = None if probe is None else self.compute_log_probs(probe)
            self.sender.send(version)
        release_cached_memory()
        return log_probs

    def compute_log_probs(self, probe: Probe) -> Tensor:
        """Returns the log-probs (L - 1,) of a probe's tokens at temperature 1."""
        ids = torch.tensor(probe.token_ids)
        mask = torch.arange(len(ids)) > 0
        row = PackedRow.of([Sample(token_ids=ids, action_mask=mask, images=probe.images)])
        return self.model.forward([row], lambda model, row: model(row).log_probs)[0]

    def weight_fingerprints(self) -> dict[str, WeightFingerprint]:
        """Returns fingerprints of the weights; see `PolicyRanks.weight_fingerprints`. Collective."""
        return fingerprints(self.model.weights(part=self.sender.source.whole_part))


class CriticWorker(TrainedWorker):
    """One rank of the critic."""

    name = "critic"

    @property
    def optim(self) -> CriticConfig:
        return self.config.critic

    def start(self, address: str, port: int, total_steps: int) -> None:
        self.join(address, port)
        config, critic = self.config, self.config.critic
        checkpointing = critic.gradient_checkpointing_enable
        self.model = self._engine(
            partial(self.build_model, config.critic_path, CRITIC_FLAG),
            total_steps,
            config.actor.gradient_checkpointing_enable if checkpointing is None else checkpointing,
        )
        offload_optimizer(self.model, config.ds.enable_sleep)

    def build_model(self, path: str, flag: str) -> ValueModel:
        """Builds the critic from a reward model, whose head it keeps, or from a plain language model, which
        gets a new head."""
        ds = self.config.ds
        scorer = load_reward_model(self.config, path, flag, in_4bit=ds.load_in_4bit)
        if self.config.critic_freezes_router:
            freeze_routers(scorer.model)
        return ValueModel(prepare_for_training(scorer.model, ds))

    def read(self, model: Callable, row: PackedRow) -> Tensor:
        return model(row)

    def objective(self, kl_coef: float, loss: Loss = None) -> Objective[ExperienceRow]:
        objective = CriticObjective.from_config(self.config)
        return balanced(objective, self.config.critic_aux_loss_coef, "critic")

    def update(
        self, batch: Batch, mini_batches: Sequence[Sequence[int]], kl_coef: float, is_fresh: bool = True
    ) -> Learned:
        """Updates the critic; every metric's name starts with `critic/`."""
        steps, _ = super().update(batch, mini_batches, kl_coef, is_fresh)
        named = [{f"critic/{name.removeprefix('critic/')}": m for name, m in step.items()} for step in steps]
        return named, None


def balanced(objective: Objective[ExperienceRow], coef: float, section: str) -> Objective[ExperienceRow]:
    """Adds the load-balancing loss of experts to `objective`, unless `coef` is 0."""
    if not coef:
        return objective
    return BalancedObjective(objective=objective, coef=coef, metric=f"{section}/balance_loss")
