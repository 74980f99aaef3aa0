"""The loop of supervised training on a fixed dataset: SFT, reward models, DPO, KTO, distillation.

Each step minimizes an objective over a batch of samples, packed into rows of this rank. A `Task` (task.py)
has the dataset and the objective. What watches a run is a hook (observability/hooks): its checks, and users'
own.
"""

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic

from torch import Tensor

from openrlhf.backends.base import Objective, RowT, Trainable
from openrlhf.backends.finite import NotFiniteError
from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.checkpoint.run_fingerprint import RunFingerprint
from openrlhf.config.sections import is_due
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.data.batches import MiniBatches
from openrlhf.observability.hooks.base import Hook, announce
from openrlhf.observability.observer import Observer
from openrlhf.rows import LossNorm
from openrlhf.stopping import Stop, limited
from openrlhf.training.saving import SavedEngine, Saver
from openrlhf.types import Metrics


@dataclass(kw_only=True)
class SupervisedTrainer(Generic[RowT]):
    """Trains a model on a fixed dataset. Runs on every rank; only rank 0 has an observer."""

    config: SupervisedConfig
    engine: Trainable
    objective: Objective[RowT]
    mini_batches: MiniBatches[RowT]
    eval_rows: Sequence[RowT]
    """This rank's shard of the evaluation set; empty without one."""
    checkpoints: CheckpointFolder
    export: Callable[[str], None]
    """Writes model and tokenizer in Hugging Face format to a folder. Collective."""
    observer: Observer | None
    prepare: Callable[[Sequence[RowT]], Objective[RowT]] | None = None
    """Function from the rows of a step to their objective, if that needs a statistic of the whole batch."""
    hooks: Sequence[Hook] = ()
    """All that listen to the events of the loop on this rank, in this order."""
    step: int = 0
    """Number of optimizer steps done."""
    last_step: int | None = None
    """Step after which a replay ends; None: the run's last one."""
    stop: Stop = field(default_factory=Stop)
    on_any_rank: Callable[[bool], bool] = bool
    """Tells whether its argument is True on some rank. Collective. The default is for a single rank."""
    saver: Saver = field(init=False)

    def __post_init__(self) -> None:
        self.saver = Saver(
            checkpoints=self.checkpoints,
            models=SavedEngine(self.engine, self.export, self.on_any_rank, later=self.config.ckpt.async_save),
            phase=self._phase,
            hooks=self.hooks,
            commits=lambda: self.observer is not None,
        )

    def fit(self) -> None:
        """Trains to the last step. On a request to stop, saves a checkpoint and raises Stopped."""
        data_step = self.step - self.checkpoints.fork.get("data_from", 0)
        left = (self.last_step or self.total_steps) - self.step
        try:
            for rows in islice(self.mini_batches.endless(data_step), max(0, left)):
                self.train_step(rows)
        except NotFiniteError:  # raised on all ranks, after the last checkpoint
            self.saver.finish()
            raise
        self.saver.finish()

    def train_step(self, rows: Sequence[RowT]) -> None:
        """Takes an optimizer step on these packed rows of the rank, evaluates, logs and saves."""
        with limited(self.config.train.rank_timeout, self._place):
            objective = self._objective_for(rows)
            announce(self.hooks, Hook.before_step, self.step + 1, rows, objective)
            metrics = self.engine.train_step(rows, objective)
        self.step += 1
        announce(self.hooks, Hook.after_step, self.step, metrics)
        if self.eval_rows and self._is_eval_due():
            metrics |= self.evaluate()
        if self.observer:
            self.observer.log_step(self.step, metrics)
        if is_saved := self.saver.is_due(self.step):
            self.saver.save(self.step, self.state())
        else:
            self.saver.finish_if_written()
        if self.on_any_rank(self.stop.is_requested):
            if not is_saved:
                self.saver.save(self.step, self.state())
            self.saver.finish()
            raise self.stop.at_boundary(saved=True)

    def evaluate(self) -> Metrics:
        """Returns the objective's metrics over the evaluation set, with names `eval/...`."""
        with self._phase("evaluate", len(self.eval_rows)):
            objective = self._counted(self._objective_for(self.eval_rows))
            metrics = self.engine.evaluate(self.eval_rows, objective)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs besides its model."""
        return {"step": self.step}

    def resume(self, tag: str) -> None:
        """Loads a checkpoint. Raises UsageError if it belongs to another run."""
        state = self.engine.load_checkpoint(str(self.checkpoints.path), tag)
        if "origin" in state:  # older checkpoints, which have no origin file
            self.checkpoints.check(tag, RunFingerprint.from_state(state["origin"]))
        self.step = state["step"]

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        return self.config.train.total_steps(len(self.mini_batches))

    def _place(self) -> str:
        rank, host = os.environ.get("RANK", "0"), platform.node()
        return f"rank {rank} (process {os.getpid()} on {host}) in step {self.step + 1}"

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
        return is_due(self.step, len(self.mini_batches)) or self.step == self.total_steps
