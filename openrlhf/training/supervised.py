"""The training loop for fixed datasets. A task provides the dataset and the objective."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol

from torch import Tensor

from openrlhf.backends.base import Objective, RowT, TrainEngine
from openrlhf.config.sections import is_due
from openrlhf.config.supervised import SupervisedConfig, TrainConfig
from openrlhf.observability.observer import Observer
from openrlhf.training.checkpoints import COPY, CheckpointFolder
from openrlhf.training.origin import Origin
from openrlhf.types import LossNorm, Metrics


class Windows(Protocol[RowT]):
    """The optimizer steps of an epoch, as data/batches.py lays them out."""

    def __len__(self) -> int:
        """Returns the optimizer steps of an epoch."""
        ...

    def endless(self, start_step: int = 0) -> Iterator[Sequence[RowT]]:
        """Yields this rank's rows of each step from `start_step` on, epoch after epoch."""
        ...


@dataclass(kw_only=True)
class SupervisedTrainer(Generic[RowT]):
    """Runs on every rank; only rank 0 has an observer."""

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
    """Optional rows -> objective, for objectives that first need a statistic of the whole batch."""
    step: int = 0
    """Optimizer steps done."""

    def fit(self) -> None:
        for window in islice(self.windows.endless(self.step), max(0, self.total_steps - self.step)):
            metrics = self.engine.train_step(window, self._objective_for(window))
            self.step += 1
            if self.eval_rows and self._is_eval_due():
                metrics |= self.evaluate()
            if self.observer:
                self.observer.log_step(self.step, metrics)
            if is_due(self.step, self.config.ckpt.save_steps):
                self.save(f"global_step{self.step}")

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return total_steps(self.config.train, len(self.windows))

    def evaluate(self) -> Metrics:
        """Returns the objective's metrics over the whole evaluation set, as `eval/...`."""
        with self._phase("evaluate", len(self.eval_rows)):
            objective = self._counted(self._objective_for(self.eval_rows))
            metrics = self.engine.evaluate(self.eval_rows, objective)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def save(self, tag: str) -> None:
        """Saves a checkpoint to resume from, a Hugging Face copy, or both, as `ckpt.*` says."""
        checkpoints, commits = self.checkpoints, self.observer is not None
        with self._phase("save"), checkpoints.saving(tag, commits=commits) as folder:
            if not self.config.ckpt.disable_ds:
                self.engine.save_checkpoint(str(folder), tag, self.state())
            if self.config.ckpt.save_hf:
                self.export(f"{self.config.ckpt.folder}/{tag}{COPY}")

    def state(self) -> dict[str, Any]:
        """Returns everything that a resumed run needs apart from its model."""
        return {"step": self.step}

    def resume(self, tag: str) -> None:
        state = self.engine.load_checkpoint(str(self.checkpoints.path), tag)
        if "origin" in state:  # checkpoints that have no file that says it
            self.checkpoints.check(tag, Origin.of_state(state["origin"]))
        self.step = state["step"]

    def _objective_for(self, rows: Sequence[RowT]) -> Objective[RowT]:
        return self.prepare(rows) if self.prepare else self.objective

    def _phase(self, name: str, total: int | None = None) -> AbstractContextManager[object]:
        """Shows a named phase of the run on the rank with the observer."""
        return self.observer.phase(name, total) if self.observer else nullcontext()

    def _counted(self, objective: Objective[RowT]) -> Objective[RowT]:
        """Wraps `objective` so that each row advances the progress of the phase."""

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


def total_steps(train: TrainConfig, steps_per_epoch: int) -> int:
    """Returns the optimizer steps of the whole run."""
    steps = steps_per_epoch * train.max_epochs
    return steps if train.max_steps is None else min(steps, train.max_steps)
