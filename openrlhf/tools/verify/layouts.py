"""Computes the gradient of the same items in several layouts of their rows: one item in a row, several, all,
in another order. The command's own code builds everything up to the optimizer step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from openrlhf.api import LossNorm, Metrics, Objective, TrainedRank

Layout = tuple[bool, Mapping[str, Any]]
"""True if the items are shuffled, and changes of the flags `train.*`."""

ONE_BY_ONE, ALL = "one by one", "all in a row"
LAYOUTS: Mapping[str, Layout] = {
    ONE_BY_ONE: (False, {"micro_batch_size": 1, "dynamic_batch_enable": False}),
    "shuffled, three in a row": (True, {"micro_batch_size": 3, "dynamic_batch_enable": False}),
    "300 tokens in a row": (True, {"dynamic_batch_enable": True, "max_tokens_per_gpu": 300}),
    ALL: (False, {"dynamic_batch_enable": True, "max_tokens_per_gpu": 10**6}),
}


class LayoutStep(NamedTuple):
    """An optimizer step in one layout, as a trainer computed it."""

    layout: str
    rows: list
    objective: Objective
    gradients: dict[str, Tensor]
    """Gradient of each trained weight, unsharded."""
    metrics: Metrics


TOTAL_LOSS = "verification/loss"
"""Metric with the whole loss of a step, which may have terms that the objective's own metrics leave out."""


def step_with_gradients(
    engine: TrainedRank, rows: Sequence, objective: Objective, *also: tuple[Sequence, Objective]
) -> tuple[dict[str, Tensor], Metrics]:
    """Takes an optimizer step. Returns its gradients, and its metrics with `TOTAL_LOSS`. At a learning rate
    of 0 the weights stay as they are. `also`: rows and objectives of auxiliary losses."""
    found: dict[str, Tensor] = {}

    def with_loss(model: Callable, row: Any, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = objective(model, row, norm)
        return loss, metrics | {TOTAL_LOSS: loss.detach()}

    engine.before_step = lambda: found.update(engine.gradients())
    try:
        return found, engine.train_step(rows, with_loss, *also)
    finally:
        engine.before_step = None


def steps(
    run: Any, layouts: Iterable[str] = LAYOUTS, indices: Sequence[int] | None = None
) -> Iterator[LayoutStep]:
    """Yields one optimizer step for each layout, on the items at `indices` of the run's training set (all by
    default) as one batch. `run`: a `SupervisedRun` with learning rate 0."""
    engine, task = run.engine, run.task
    prepare = objective_of_rows(run)
    items = run.train_set if indices is None else Chosen(run.train_set, indices)
    train = task.config.train
    try:
        for layout in layouts:
            shuffle, changes = LAYOUTS[layout]
            task.config = replace(task.config, train=replace(train, **changes))
            (rows,) = run.lay_out(items, batch_size=len(items), shuffle=shuffle).epoch(0)
            minimised = prepare(rows)
            yield LayoutStep(layout, rows, minimised, *step_with_gradients(engine, rows, minimised))
    finally:
        task.config = replace(task.config, train=train)


def objective_of_rows(run: Any) -> Callable[[Sequence], Objective]:
    """Returns the function from the rows of a run's optimizer step to their objective."""
    objective = run.task.objective(run)
    return run.task.prepare(run, objective) or (lambda rows: objective)


class Chosen:
    """The items of a dataset at some indices."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self._dataset, self._indices = dataset, list(indices)

    @property
    def lengths(self) -> Sequence[int]:
        return [self._dataset.lengths[i] for i in self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, i: int, /) -> Any:
        return self._dataset[self._indices[i]]

    def sequences(self, i: int, /) -> Any:
        return self._dataset.sequences(self._indices[i])
