"""The training loop on fixed datasets. A `Task` defines the dataset and the objective."""

import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, NoReturn

from torch import Tensor

from openrlhf.backends.base import Objective, RowT, TrainEngine
from openrlhf.backends.finite import NotFiniteError
from openrlhf.config.sections import is_due
from openrlhf.config.supervised import SupervisedConfig, TrainConfig
from openrlhf.data.batches import Windows
from openrlhf.errors import counted
from openrlhf.observability.observer import Observer
from openrlhf.stopping import Stop, limited
from openrlhf.training.checkpoints import COPY, CheckpointFolder
from openrlhf.training.invariants import check_epochs, check_learning_rate
from openrlhf.training.origin import Origin
from openrlhf.training.plain import plain_learning_rate
from openrlhf.types import LossNorm, Metrics


@dataclass(kw_only=True)
class SupervisedTrainer(Generic[RowT]):
    """Trains a model on a fixed dataset. Runs on every rank; only rank 0 has an observer."""

    config: SupervisedConfig
    engine: TrainEngine
    objective: Objective[RowT]
    windows: Windows[RowT]
    eval_rows: Sequence[RowT]
    """This rank's shard of the evaluation set; empty without one."""
    checkpoints: CheckpointFolder
    export: Callable[[str], None]
    """Writes model and tokenizer in Hugging Face format to a folder. Collective."""
    observer: Observer | None
    prepare: Callable[[Sequence[RowT]], Objective[RowT]] | None = None
    """Optional function from the rows of a step to their objective, for objectives that need a statistic of
    the whole batch first."""
    verify: Callable[[Sequence[RowT], Objective[RowT], int], None] | None = None
    """Checks the optimizer step on these rows with this objective and of this number, before it is taken.
    Called for the first `train.verify_steps` steps."""
    step: int = 0
    """Number of optimizer steps done."""
    last_step: int | None = None
    """Step after which a replay ends; None: the run's last one."""
    stop: Stop = field(default_factory=Stop)
    on_any_rank: Callable[[bool], bool] = bool
    """Tells whether its argument is True on some rank. Collective. The default is for a single rank."""
    unfinished: str | None = field(default=None, init=False)
    """Tag of the checkpoint that is being written while training goes on."""

    def fit(self) -> None:
        """Trains to the last step. If a rank is asked to stop, saves a checkpoint after the current step and
        raises Stopped."""
        try:
            self._fit()
        except NotFiniteError:  # raised on all ranks, after the last checkpoint
            self.finish_checkpoint()
            raise
        self.finish_checkpoint()

    def _fit(self) -> None:
        unverified_from = self.step + self.config.train.verify_steps
        if self.config.train.verify_steps and self.windows.shuffles:
            check_epochs("samples", self.windows.order, self.step + 1)
        data_step = self.step - self.checkpoints.fork.get("data_from", 0)
        left = (self.last_step or self.total_steps) - self.step
        for window in islice(self.windows.endless(data_step), max(0, left)):
            with limited(self.config.train.rank_timeout, self._place):
                objective = self._objective_for(window)
                if self.verify and self.step < unverified_from:
                    self.verify(window, objective, self.step + 1)
                metrics = self.engine.train_step(window, objective)
            expected = plain_learning_rate(self.config, self.step, self.total_steps)
            self.step += 1
            check_learning_rate(metrics, expected, self.config.ds.param_dtype, self.step)
            if self.eval_rows and self._is_eval_due():
                metrics |= self.evaluate()
            if self.observer:
                self.observer.log_step(self.step, metrics)
            if is_due(self.step, self.config.ckpt.save_steps):
                self.save(f"global_step{self.step}")
            elif self.unfinished and not self.on_any_rank(not self.engine.has_written):
                self.finish_checkpoint()
            if self.on_any_rank(self.stop.is_requested):
                self._end_at_boundary()

    def _place(self) -> str:
        rank, host = os.environ.get("RANK", "0"), platform.node()
        return f"rank {rank} (process {os.getpid()} on {host}) in step {self.step + 1}"

    def _end_at_boundary(self) -> NoReturn:
        if not is_due(self.step, self.config.ckpt.save_steps):
            self.save(f"global_step{self.step}")
        self.finish_checkpoint()
        raise self.stop.at_boundary(saved=True)

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        return total_steps(self.config.train, len(self.windows))

    def evaluate(self) -> Metrics:
        """Returns the objective's metrics over the evaluation set, with names `eval/...`."""
        with self._phase("evaluate", len(self.eval_rows)):
            objective = self._counted(self._objective_for(self.eval_rows))
            metrics = self.engine.evaluate(self.eval_rows, objective)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def save(self, tag: str) -> None:
        """Saves a checkpoint to resume from, a Hugging Face copy, or both, as the flags `ckpt.*` select. With
        `ckpt.async_save` the checkpoint is still being written when this method returns."""
        self.finish_checkpoint()
        ckpt, commits = self.config.ckpt, self.observer is not None
        with self._phase("save"), self.checkpoints.writing(commits=commits) as folder:
            if not ckpt.disable_ds:
                self.engine.save_checkpoint(str(folder), tag, self.state(), later=ckpt.async_save)
            if ckpt.save_hf:
                self.export(f"{ckpt.folder}/{tag}{COPY}")
        self.unfinished = tag
        if not ckpt.async_save:
            self.finish_checkpoint()

    def finish_checkpoint(self) -> None:
        """Waits for the checkpoint that is being written, if there is one, and commits it. Collective. Raises
        RunError if it could not be written."""
        tag, self.unfinished = self.unfinished, None
        if tag is not None:
            commits = self.observer is not None
            with self._phase("save"), self.checkpoints.saving(tag, commits=commits):
                if self.config.ckpt.async_save:
                    self.engine.finish_checkpoint()

    def state(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs besides its model."""
        return {"step": self.step}

    def resume(self, tag: str) -> None:
        """Loads a checkpoint. Raises UsageError if it belongs to another run."""
        state = self.engine.load_checkpoint(str(self.checkpoints.path), tag)
        if "origin" in state:  # older checkpoints, which have no origin file
            self.checkpoints.check(tag, Origin.of_state(state["origin"]))
        self.step = state["step"]

    def _objective_for(self, rows: Sequence[RowT]) -> Objective[RowT]:
        return self.prepare(rows) if self.prepare else self.objective

    def _phase(self, name: str, total: int | None = None) -> AbstractContextManager[object]:
        """Reports a phase of the run to the observer, on the rank that has one."""
        return self.observer.phase(name, total) if self.observer else nullcontext()

    def _counted(self, objective: Objective[RowT]) -> Objective[RowT]:
        """Wraps `objective` so that each row advances the progress bar."""

        def counted(model: Callable, row: RowT, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
            if self.observer:
                self.observer.advance(1)
            return objective(model, row, norm)

        return counted

    def _is_eval_due(self) -> bool:
        every = self.config.eval.steps
        if every != -1:
            return is_due(self.step, every)
        return is_due(self.step, len(self.windows)) or self.step == self.total_steps


def data_notes(config: SupervisedConfig, num_samples: int) -> Iterator[str]:
    """Yields what a run of `num_samples` samples does otherwise than its flags say."""
    train, data, evaluation = config.train, config.data, config.eval
    steps, size = total_steps(train, math.ceil(num_samples / train.batch_size)), train.batch_size
    if num_samples < size:
        few = f"all {counted(num_samples, 'sample')}, fewer than --train.batch_size {size}"
        yield f"every optimizer step has {few}"
    if train.max_steps and steps < train.max_steps:
        end = f"with --train.max_epochs {train.max_epochs} the data is used up after step {steps}"
        yield f"--train.max_steps {train.max_steps} is not reached: {end}"
    same_split = evaluation.split == data.dataset_split or os.path.isfile(data.dataset)
    if evaluation.dataset == data.dataset and same_split:
        yield f"--eval.dataset {evaluation.dataset} is trained on: no held-out scores"


def total_steps(train: TrainConfig, steps_per_epoch: int) -> int:
    """Returns the number of optimizer steps of the whole run."""
    steps = steps_per_epoch * train.max_epochs
    return steps if train.max_steps is None else min(steps, train.max_steps)
