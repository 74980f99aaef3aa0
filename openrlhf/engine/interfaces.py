"""What a trainer may ask of the machinery. The only lines that DeepSpeed, vLLM and Ray hide behind.

Every verb of a group returns at once. Work on different devices overlaps until somebody asks for a result;
models that share devices take turns, and moving them in and out is their own affair (see
cluster/residency.py).
"""

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

from torch import Tensor

from openrlhf.types import Experience, LossNorm, Metrics, Prompt, Sample, Trajectory

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

    def to(self, device) -> Self: ...

    def empty(self) -> Self:
        """A row of the same kind without actions."""
        ...


RowT = TypeVar("RowT", bound=Row)

Objective = Callable[[Callable, RowT, LossNorm], tuple[Tensor, dict[str, Tensor]]]
"""(model, row, norm) -> (loss, metrics): the row's share of the step's loss and of each metric. The shares of
all rows on all ranks add up to the value."""


class TrainEngine(Protocol):
    """One rank of a model in training."""

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

    def save_checkpoint(self, folder: str, tag: str, state: dict) -> None: ...

    def load_checkpoint(self, folder: str, tag: str) -> dict:
        """Restore weights, optimizer and schedule; return the `state` that was saved with them."""
        ...

    def export(self, folder: str) -> None:
        """Write the model in Hugging Face format."""
        ...


class Pending(Protocol[ResultT]):
    def result(self) -> ResultT:
        """Wait for the work and return what it produced, or raise what it raised."""
        ...


class ModelGroup(Protocol):
    """One model sharded over many devices, seen from the controller."""

    def forward(self, samples: Sequence[Sample]) -> Pending[list[Tensor]]:
        """One (A,) tensor for each sample: log-probs of a policy, values of a critic."""
        ...


class TrainableGroup(ModelGroup, Protocol):
    def update(self, experiences: Sequence[Experience], num_batches: int, kl_coef: float) -> Pending[Metrics]:
        """`train.max_epochs` passes over the experiences, each of `num_batches` optimizer steps."""
        ...

    def save_checkpoint(self, tag: str, state: dict) -> Pending[None]: ...

    def load_checkpoint(self, tag: str) -> Pending[dict]: ...

    def export(self, folder: str) -> Pending[None]: ...


class Rollout(Protocol):
    """All the samplers together."""

    def generate(self, prompts: Sequence[Prompt]) -> Pending[list[Trajectory]]:
        """The training samples of `prompts`, grouped by prompt, in order."""
        ...

    def evaluate(self, prompts: Sequence[Prompt]) -> Pending[list[Trajectory]]:
        """The same with the evaluation's sampling parameters and number of samples."""
        ...

    def load_weights(self, policy: TrainableGroup, version: int) -> Pending[Metrics]:
        """Make every sampler use the policy's current weights, and check that it does."""
        ...
