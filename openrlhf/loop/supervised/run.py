"""The run of a supervised command on one rank: data, model, checkpoints, training, and its end."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from openrlhf import heap
from openrlhf.backends.base import Objective, Row
from openrlhf.backends.build import build_engine, build_frozen
from openrlhf.backends.distributed import (
    ProcessMesh,
    from_first,
    init_distributed,
    machines_without,
    on_any_rank,
    seed_everything,
)
from openrlhf.backends.model_rank import FrozenRank
from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.checkpoint.fork import find_or_fork
from openrlhf.checkpoint.of_models import build_run_fingerprint, check_space
from openrlhf.checkpoint.run_fingerprint import RunFingerprint
from openrlhf.checkpoint.start import (
    choose_checkpoint,
    find_grace,
    find_start_day,
    lock_folders,
    move_old_checkpoints,
    position,
)
from openrlhf.config.checks import SCATTERED
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.data.batches import Dataset, MiniBatches
from openrlhf.data.cache import arrays_digest
from openrlhf.data.store import Samples, TwoSamples
from openrlhf.device import own_bytes
from openrlhf.errors import ErrorCode, UsageError, counted, noting_position
from openrlhf.files import exporting
from openrlhf.loop.sft import SupervisedTrainer
from openrlhf.loop.supervised.data_checks import data_notes
from openrlhf.loop.supervised.datasets import build_datasets, lay_out
from openrlhf.loop.supervised.model_checks import reader_of
from openrlhf.loop.supervised.task import Task
from openrlhf.memory.rows import memory_of_rows
from openrlhf.models.backbone import RowModel
from openrlhf.models.ends import log_stops, trained_ends
from openrlhf.models.experts import freeze_routers
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.saving import save_ends
from openrlhf.models.tokenizers import load_run_tokenizer
from openrlhf.models.vision import freeze_vision
from openrlhf.observability.hooks.load import attached, build_hooks
from openrlhf.observability.observer import Observer
from openrlhf.observability.startup import StartClock
from openrlhf.observability.waits import waiting
from openrlhf.text import Calendar
from openrlhf.training.objectives.balanced import BalancedObjective
from openrlhf.training.publish import publish

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


class SupervisedRun(Generic[ConfigT]):
    """The parts of a supervised command on one rank."""

    shares_prefixes = False
    """True if the model computes common prefixes once. Rows are then filled accordingly, unless they have
    images."""

    def __init__(
        self, task: Task[ConfigT], argv: Sequence[str], held: ExitStack, clock: StartClock | None = None
    ) -> None:
        """Builds the run, and locks its folders until `held` is closed. `clock`: measures the stages."""
        self.clock = clock = clock or StartClock()
        with waiting("connecting to the other ranks"), clock.stage("libraries"):
            heap.freeze()
            init_distributed(timeout_minutes=task.config.train.rank_timeout / 60 + 1)
            self.mesh = ProcessMesh.joined(
                sequence=task.config.ds.ring_attn_size, tensor=task.config.ds.tensor_parallel_size
            )
        self.task, self.config, self.argv = task, task.config, argv
        config = task.config
        seed_everything(config.train.seed, config.train.full_determinism_enable)
        with clock.stage("data"):
            Calendar.today = from_first(partial(find_start_day, config))
            self.tokenizer = load_run_tokenizer(config)
            if task.learns_ends:
                log_stops(config, self.tokenizer, learns=True)
            self.train_set, self.eval_set = build_datasets(task, self.tokenizer)
        self.total_steps = config.train.total_steps(len(self.mini_batches))
        self.checkpoints = CheckpointFolder.of(
            config, self._run_fingerprint() if config.ckpt.is_used else None
        )
        self.tag = self._choose_checkpoint(held)
        with waiting("loading the model", key=config.model.model_name_or_path), clock.stage("model"):
            self.engine = build_engine(
                self._build_model,
                backend=config.train.backend,
                optim=config,
                ds=config.ds,
                total_steps=self.total_steps,
                gradient_checkpointing=config.model.gradient_checkpointing_enable,
                reentrant=config.model.gradient_checkpointing_reentrant,
                dropout=config.model.dropout_enable,
                skip_nonfinite=config.train.on_nonfinite == "skip_step",
                mesh=self.mesh,
            )
        self.shares_prefixes = self.engine.trains_on_prefixes and not config.data.reads_images

    @property
    def mini_batches(self) -> MiniBatches[Row]:
        """The training set in optimizer steps, as far as they are this rank's."""
        return self.lay_out(self.train_set, batch_size=self.config.train.batch_size, shuffle=True)

    def _build_model(self) -> RowModel:
        module = self.task.load_model(self.tokenizer)
        if self.config.model.freeze_visual_encoder:
            freeze_vision(module.model)
        if self.config.model.freeze_moe_router:
            freeze_routers(module.model)
        prepare_for_training(module.model, self.config.ds)
        return module

    def frozen(self, build_model: Callable[[], RowModel], offload: bool) -> FrozenRank:
        """Builds a frozen model (a reference or a teacher) on the ranks of this run."""
        config = self.config
        return build_frozen(
            build_model, backend=config.train.backend, ds=config.ds, offload=offload, mesh=self.mesh
        )

    def lay_out(self, dataset: Dataset, *, batch_size: int, shuffle: bool) -> MiniBatches[Row]:
        """Returns this rank's part of the optimizer steps of an epoch."""
        return lay_out(
            self.task,
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            mesh=self.mesh,
            shares_prefixes=self.shares_prefixes,
        )

    def attach_reference(self, answers: Callable[[Samples], np.ndarray]) -> None:
        """Adds reference log-probs `answers(dataset)`, (n, 2), to the training set and the evaluation set.
        Each item has two samples."""

        def attached(dataset: Samples) -> Samples:
            assert isinstance(dataset, TwoSamples)
            return dataset.with_reference(answers(dataset))

        self.train_set = attached(self.train_set)
        if self.eval_set is not None:
            self.eval_set = attached(self.eval_set)

    def whole(self, dataset: Dataset, most: int | None = None) -> list[Any]:
        """Returns this rank's rows of the whole dataset, or of its first `most` items, as if they were one
        batch."""
        return next(self.lay_out(dataset, batch_size=most or len(dataset), shuffle=False).epoch(0))

    def trainer(self) -> SupervisedTrainer:
        """Returns the trainer, at the checkpoint or the beginning. On rank 0 it has an observer, which has
        started."""
        config, engine = self.config, self.engine
        objective = self.task.objective(self)
        prepare = self.task.prepare(self, objective)
        if config.model.aux_loss_coef > 0:
            objective, prepare = balanced(objective, prepare, config.model.aux_loss_coef)
        trainer = SupervisedTrainer(
            config=config,
            engine=engine,
            objective=objective,
            prepare=prepare,
            mini_batches=self.mini_batches,
            eval_rows=[] if self.eval_set is None else self.whole(self.eval_set),
            checkpoints=self.checkpoints,
            export=self.export,
            observer=None,
            hooks=[
                *attached("supervised", config, engine=engine, mesh=self.mesh, windows=self.mini_batches),
                *build_hooks(config.train.hooks),
            ],
            on_any_rank=on_any_rank,
        )
        if self.tag is not None:
            with waiting("loading the checkpoint", key=config.model.model_name_or_path):
                trainer.resume(self.tag)
        if self.mesh.is_first:
            move_old_checkpoints(self.checkpoints, self.tag)
            trainer.observer = self._observer(resume_step=None if self.tag is None else trainer.step)
            trainer.observer.start(self.total_steps, done=trainer.step)
            trainer.observer.message(
                f"{len(self.train_set)} samples, {sum(self.train_set.lengths)} tokens, "
                f"{counted(len(self.mini_batches), 'step')} an epoch; run folder {config.run_dir}"
            )
            for note in data_notes(config, len(self.train_set)):
                trainer.observer.message(f"note: {note}")
            trainer.observer.message(self._memory_of_rows())
            trainer.observer.started(self.clock)
        return trainer

    def train(self) -> None:
        """Trains from the checkpoint or the beginning, and saves and publishes the model."""
        config, trainer = self.config, self.trainer()
        with noting_position(partial(position, trainer)), trainer.stop.deferred(find_grace(config)):
            try:
                trainer.fit()
            finally:
                if trainer.observer:
                    trainer.observer.close()
            self.task.finish(self)
            with waiting("saving the model", key=config.model.model_name_or_path):
                self.export(config.ckpt.output_dir)
        if self.mesh.is_first:
            publish(
                config,
                self.task.command,
                base_model=config.model.model_name_or_path,
                datasets=config.data.dataset,
            )

    def _memory_of_rows(self) -> str:
        longest, estimate = max(self.train_set.lengths), self.engine.row_memory
        needs = memory_of_rows(estimate, self.config.train, longest, self.mesh.sequence, own_bytes())
        return f"estimated memory of a rank: {needs}"

    def _choose_checkpoint(self, held: ExitStack) -> str | None:
        """Returns the tag of the checkpoint to resume from, the same on all ranks; None to start from the
        beginning. Rank 0 also locks the folders and prints."""
        ckpt = self.config.ckpt
        if ckpt.has_parts and (machines := machines_without(ckpt.folder)):
            text = SCATTERED.format(", ".join(machines))
            raise UsageError(ErrorCode.NOT_FOUND, text, flag="--ckpt.path", value=ckpt.folder)
        if self.mesh.is_first:
            lock_folders(self.checkpoints, self.config.run_dir, held)
        found = from_first(partial(find_or_fork, self.config, self.checkpoints, self.total_steps))
        if self.mesh.is_first:
            check_space(self.config, self.checkpoints, self.total_steps)
            return choose_checkpoint(self.config, self.checkpoints, found)
        return self.checkpoints.choose(found)[0]

    def _run_fingerprint(self) -> RunFingerprint:
        config, checksum = self.config, arrays_digest(self.train_set.arrays())[:16]
        more = {"--data.dataset": f"{len(self.train_set)} samples (checksum {checksum})"}
        models = {flag: [path] for flag, path in self.task.models().items()}
        return build_run_fingerprint(config, self.task.command, models, more)

    def export(self, folder: str) -> None:
        """Writes the model with its tokenizer or processor in Hugging Face format. Collective."""
        with exporting(folder) if self.mesh.is_first else nullcontext(folder) as made:
            self.engine.export(str(made))
            if self.mesh.is_first:
                reader_of(self.config, self.tokenizer).save_pretrained(made)
                if self.task.learns_ends:
                    ends = trained_ends(self.config, self.tokenizer)
                    save_ends(made, self.config.model.model_name_or_path, ends)

    def _observer(self, resume_step: int | None) -> Observer:
        return Observer.opened(
            self.config,
            ["-m", f"openrlhf.cli.train_{self.task.command.name}", *self.argv],
            resume_step=resume_step,
            forks=self.checkpoints.changed is not None,
            fork=self.checkpoints.fork,
        )


def balanced(
    objective: Objective, prepare: Callable[[Sequence[Any]], Objective] | None, coef: float
) -> tuple[Objective, Callable[[Sequence[Any]], Objective] | None]:
    """Adds the load-balancing loss of experts to the objective, and to those that `prepare` returns."""
    add = lambda inner: BalancedObjective(objective=inner, coef=coef)
    return add(objective), None if prepare is None else lambda rows: add(prepare(rows))
