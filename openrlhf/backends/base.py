"""What a trainer may ask of the machinery. The only lines that DeepSpeed, vLLM and Ray hide behind.

Every verb of a group returns at once. Work on different devices overlaps until somebody asks for a result;
models that share devices compute one after the other, and moving them in and out is their own affair (see
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
    """What one forward pass reads: a packed row, with or without more fields for each action."""

    @property
    def num_tokens(self) -> int:
        """Actions in the row."""
        ...

    @property
    def num_sequences(self) -> int:
        """Sequences with at least one action."""
        ...

    def to(self, device: torch.device) -> Self: ...

    def empty(self) -> Self:
        """A row of the same kind without actions."""
        ...


RowT = TypeVar("RowT", bound=Row)

Objective = Callable[[Callable, RowT, LossNorm], tuple[Tensor, dict[str, Tensor]]]
"""(model, row, norm) -> (loss, metrics): the row's contribution to the step's loss and to each metric. The
contributions of all rows on all ranks add up to the value."""


Part = Literal["merged", "base", "adapter"]
"""Of a model's weights: all, adapters merged into them; all, as they are below adapters; adapters alone."""


class RowModule(Protocol):
    """A module that answers about packed rows, around a Hugging Face model (models/backbone.py)."""

    model: Any

    def __call__(self, row: Any, *args: Any, **options: Any) -> Any: ...


class FrozenModel(Protocol):
    """One rank of a model that only answers: a reference, a teacher or a reward model. All ranks ask
    together."""

    @property
    def module(self) -> RowModule: ...

    def __call__(self, row: Row) -> Any:
        """The model's answer about one row, by its kind (see models/)."""
        ...

    def forward(self, rows: Sequence[RowT], read: Callable[[Callable, RowT], Tensor]) -> list[Tensor]:
        """`read(model, row)` for each of this rank's rows, on the CPU. At least one row."""
        ...

    def whole(self, parameter: Tensor) -> Tensor:
        """A parameter in full, to keep."""
        ...


class TrainEngine(Protocol):
    """One rank of a model in training. Every method is collective, but for `steps` and `row_memory`."""

    @property
    def module(self) -> RowModule: ...

    @property
    def steps(self) -> int:
        """Optimizer steps done, also before a resume."""
        ...

    def train_step(
        self, window: Sequence[RowT], objective: Objective[RowT], *also: tuple[Sequence, Objective]
    ) -> Metrics:
        """Forward and backward over the rows that this rank holds of one batch, then one optimizer step.

        `also`: more (rows, objective) of the same step. Their losses are added up, and each divides by the
        totals of its own rows.
        """
        ...

    def evaluate(self, rows: Sequence[RowT], objective: Objective[RowT]) -> Metrics:
        """The objective's metrics over all rows of all ranks, without a gradient."""
        ...

    def forward(self, rows: Sequence[RowT], read: Callable[[Callable, RowT], Tensor]) -> list[Tensor]:
        """`read(model, row)` for each of this rank's rows, on the CPU. At least one row."""
        ...

    def row_memory(self, num_tokens: int) -> RowMemory:
        """Memory of this rank at the peak of a step with a row of `num_tokens`, told before there is one."""
        ...

    def weights(self, bucket_bytes: int = ..., part: Part = "merged") -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model in full, by its checkpoint's name, about `bucket_bytes` at a time."""
        ...

    def weight_metadata(self, part: Part = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) of everything that `weights` yields."""
        ...

    def random_adapter(self, seed: int) -> AbstractContextManager[None]:
        """Inside, the adapters are random; afterwards they are what they were."""
        ...

    def save_checkpoint(self, folder: str, tag: str, state: dict) -> None: ...

    def load_checkpoint(self, folder: str, tag: str) -> dict:
        """Restore weights, optimizer and schedule; return the `state` that was saved with them."""
        ...

    def export(self, folder: str) -> None:
        """Write the model in Hugging Face format, or its adapter alone where it has one."""
        ...

    def offload(self) -> None:
        """Move what only optimizer steps need to the CPU."""
        ...

    def reload(self) -> None: ...


class Pending(Protocol[ResultT]):
    def result(self) -> ResultT:
        """Wait for the work and return what it produced, or raise what it raised."""
        ...


class ModelRanks(Protocol):
    """One model sharded over many devices, seen from the controller."""

    def forward(self, batch: Batch) -> Pending[np.ndarray]:
        """(A,) float32: log-probs of a policy, values of a critic."""
        ...


class TrainableRanks(ModelRanks, Protocol):
    @property
    def data_parallel_size(self) -> int:
        """Ranks that each learn from samples of their own."""
        ...

    @property
    def num_updates(self) -> int:
        """Calls of `update` so far, also before a resume: the address of each call's shuffle."""
        ...

    def update(self, batch: Batch, schedule: Schedule, kl_coef: float) -> Pending[Updated]:
        """The optimizer steps of `schedule` over a batch with credit; just one where the batch has no
        log-probs."""
        ...

    def save_checkpoint(self, tag: str, state: dict) -> Pending[None]: ...

    def load_checkpoint(self, tag: str) -> Pending[dict]: ...

    def export(self, folder: str) -> Pending[None]: ...


PolicyT = TypeVar("PolicyT", bound=TrainableRanks, contravariant=True)


class Rollout(Protocol[PolicyT]):
    """All rollout engines of a run. Nothing waits but `next_group` and what is pending. How weights travel is
    between it and the policies that it takes them from, PolicyT."""

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        """Ask for the samples of `prompts`, with the sampling parameters of training or of evaluation."""
        ...

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        """The next prompt whose samples are all there, rewards included, in the order in which they finish.
        RuntimeError where none is under way; TimeoutError, which says what is, after `timeout` seconds."""
        ...

    def sync(self, policy: PolicyT, version: int) -> Pending[Metrics]:
        """Makes every engine use the policy's current weights, and checks that it does."""
        ...
