"""Interfaces through which a trainer uses DeepSpeed, vLLM and Ray.

Every method of a group of ranks returns at once. Work on different devices overlaps until somebody asks for a
result. Models that share devices compute one after the other, and offload each other by themselves (see
cluster/engine_memory.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from openrlhf.backends.row_memory import RowMemory
from openrlhf.types import Batch, LossNorm, Metrics, Prompt, PromptGroup, Purpose, Schedule, Updated

ResultT = TypeVar("ResultT", covariant=True)


class Row(Protocol):
    """A packed row, the input of one forward pass, with or without more fields for each action."""

    @property
    def num_tokens(self) -> int:
        """Number of actions in the row."""
        ...

    @property
    def num_sequences(self) -> int:
        """Number of sequences with at least one action."""
        ...

    def to(self, device: torch.device) -> Self: ...

    def empty(self) -> Self:
        """Returns a row of the same kind without actions, which pads a rank's rows."""
        ...


RowT = TypeVar("RowT", bound=Row)

Objective = Callable[[Callable, RowT, LossNorm], tuple[Tensor, dict[str, Tensor]]]
"""A function (model, row, norm) -> (loss, metrics) that returns the row's contribution to the step's loss and
to each metric. The contributions of all rows on all ranks add up to the value."""


Part = Literal["merged", "base", "adapter"]
"""Part of a model's weights: all with adapters merged into them, all without adapters, or adapters alone."""


class RowModule(Protocol):
    """A module around a Hugging Face model whose forward pass reads packed rows (models/backbone.py)."""

    model: Any

    def __call__(self, row: Any, *args: Any, **options: Any) -> Any: ...


class FrozenModel(Protocol):
    """One rank of a model that is not trained: a reference, a teacher or a reward model. All ranks call it
    together."""

    @property
    def module(self) -> RowModule: ...

    def __call__(self, row: Row) -> Any:
        """Returns the model's output for one row; its form depends on the kind of model (see models/)."""
        ...

    def forward(self, rows: Sequence[RowT], read: Callable[[Callable, RowT], Tensor]) -> list[Tensor]:
        """Returns `read(model, row)` for each of this rank's rows, at least one, on the CPU."""
        ...

    def whole(self, parameter: Tensor) -> Tensor:
        """Returns an unsharded parameter that the caller may keep."""
        ...


class TrainEngine(Protocol):
    """One rank of a model in training. Every method but `steps` and `row_memory` is collective."""

    @property
    def module(self) -> RowModule: ...

    @property
    def steps(self) -> int:
        """Number of optimizer steps done, including those before a resume."""
        ...

    def train_step(
        self, window: Sequence[RowT], objective: Objective[RowT], *also: tuple[Sequence, Objective]
    ) -> Metrics:
        """Runs forward and backward over this rank's rows of one batch, then one optimizer step.

        `also`: more (rows, objective) of the same step. The losses are added up, and each is divided by the
        totals of its own rows.
        """
        ...

    def evaluate(self, rows: Sequence[RowT], objective: Objective[RowT]) -> Metrics:
        """Returns the objective's metrics over all rows of all ranks, without a gradient."""
        ...

    def forward(self, rows: Sequence[RowT], read: Callable[[Callable, RowT], Tensor]) -> list[Tensor]:
        """Returns `read(model, row)` for each of this rank's rows, at least one, on the CPU."""
        ...

    def row_memory(self, num_tokens: int) -> RowMemory:
        """Estimates this rank's peak memory in a step with a row of `num_tokens`, before any step."""
        ...

    def weights(self, bucket_bytes: int = ..., part: Part = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yields (checkpoint name, unsharded tensor) of the model, gathered `bucket_bytes` or so at a
        time."""
        ...

    def weight_metadata(self, part: Part = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Returns (name, dtype, shape) of everything that `weights` yields."""
        ...

    def random_adapter(self, seed: int) -> AbstractContextManager[None]:
        """Makes the adapters random within the context, and restores them afterwards."""
        ...

    def check_finite(self, *, states: bool = True) -> None:
        """Raises RunError on every rank where the weights of one are not finite; with `states` also where
        anything else is not that a checkpoint holds."""
        ...

    def save_checkpoint(self, folder: str, tag: str, state: dict) -> None: ...

    def load_checkpoint(self, folder: str, tag: str) -> dict:
        """Restores weights, optimizer and schedule; returns the `state` that was saved with them."""
        ...

    def export(self, folder: str) -> None:
        """Writes the model in Hugging Face format, or its adapter alone where it has one."""
        ...

    def offload(self) -> None:
        """Moves everything that only optimizer steps need to the CPU."""
        ...

    def reload(self) -> None: ...


class Pending(Protocol[ResultT]):
    def result(self) -> ResultT:
        """Waits for the work and returns its result, or raises its exception."""
        ...


class ModelRanks(Protocol):
    """The ranks of one model, seen from the controller."""

    def forward(self, batch: Batch) -> Pending[np.ndarray]:
        """Returns (A,) float32: log-probs of a policy, values of a critic."""
        ...


class TrainableRanks(ModelRanks, Protocol):
    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that each learn from samples of their own."""
        ...

    @property
    def num_updates(self) -> int:
        """Number of calls of `update`, including those before a resume; it seeds each call's shuffle."""
        ...

    def update(self, batch: Batch, schedule: Schedule, kl_coef: float) -> Pending[Updated]:
        """Makes the optimizer steps of `schedule` over a batch with credit. A batch without log-probs gets
        exactly one step."""
        ...

    def save_checkpoint(self, tag: str, state: dict) -> Pending[None]: ...

    def load_checkpoint(self, tag: str) -> Pending[dict]: ...

    def export(self, folder: str) -> Pending[None]: ...


PolicyT = TypeVar("PolicyT", bound=TrainableRanks, contravariant=True)


class Rollout(Protocol[PolicyT]):
    """All rollout engines of a run. Only `next_group` and pending results block. PolicyT is the type of
    policy whose weights `sync` accepts."""

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        """Requests the samples of `prompts`, with the sampling parameters of training or of evaluation."""
        ...

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        """Returns the next prompt whose samples are all there, rewards included, in the order in which they
        finish. Raises RuntimeError where no prompt is under way, and TimeoutError, which names those that
        are, after `timeout` seconds."""
        ...

    def sync(self, policy: PolicyT, version: int) -> Pending[Metrics]:
        """Sends the policy's current weights to every engine, and checks that it computes with them."""
        ...
