"""Interfaces through which a trainer uses DeepSpeed, vLLM and Ray.

Methods of ModelRanks and TrainableRanks return a Pending result at once, so that work on different devices
overlaps. Models that share devices run one after the other, and are offloaded as needed
(cluster/engine_memory.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from openrlhf.memory.training import RankMemory
from openrlhf.types import Batch, LossNorm, Metrics, Prompt, PromptGroup, Purpose, Schedule, Updated

ResultT = TypeVar("ResultT", covariant=True)


class Row(Protocol):
    """A packed row, the input of one forward pass. It may have further fields for actions and sequences."""

    @property
    def num_tokens(self) -> int:
        """Number of actions."""
        ...

    @property
    def num_sequences(self) -> int:
        """Number of sequences with at least one action."""
        ...

    def to(self, device: torch.device) -> Self: ...

    def empty(self) -> Self:
        """Returns a dummy row of the same kind without actions, for a rank that has fewer rows than
        others."""
        ...


RowT = TypeVar("RowT", bound=Row)

Objective = Callable[[Callable, RowT, LossNorm], tuple[Tensor, dict[str, Tensor]]]
"""A function (model, row, norm) -> (loss, metrics). It returns the row's contribution to the loss of the
optimizer step and to each metric; the contributions of all rows on all ranks add up to the step's values."""


Part = Literal["merged", "base", "adapter"]
"""Part of a model's weights: `merged`: all, with adapters merged into them; `base`: all, without adapters;
`adapter`: only the adapters."""


class RowModule(Protocol):
    """A module around a Hugging Face model whose forward pass reads packed rows (models/backbone.py)."""

    model: Any

    def __call__(self, row: Any, *args: Any, **options: Any) -> Any: ...


class FrozenModel(Protocol):
    """One rank of a model that is not trained: a reference, a teacher or a reward model. Calls are
    collective."""

    @property
    def module(self) -> RowModule: ...

    @property
    def shares_prefixes(self) -> bool:
        """True if the model computes common prefixes of a row's sequences once."""
        ...

    def __call__(self, row: Row) -> Any:
        """Returns the model's output for one row; its form depends on the kind of model (see models/)."""
        ...

    def forward(self, rows: Sequence[RowT], read: Callable[[Callable, RowT], Tensor]) -> list[Tensor]:
        """Returns `read(model, row)` for each of this rank's rows, on the CPU. `rows` must not be empty."""
        ...

    def whole(self, parameter: Tensor) -> Tensor:
        """Returns a parameter without sharding. The result stays valid."""
        ...


class TrainEngine(Protocol):
    """One rank of a model in training. All methods except `steps`, `row_memory` and `has_written` are
    collective."""

    merged_fraction: float | None
    """Fraction of the adapters' change that rounding left in `weights`; None if they changed nothing."""
    before_step: Callable[[], None] | None
    """Function that `train_step` calls when the gradients are complete, before they are clipped and applied,
    such as one that reads `gradients`. None in training."""

    @property
    def module(self) -> RowModule: ...

    @property
    def shares_prefixes(self) -> bool:
        """True if the model computes common prefixes of a row's sequences once."""
        ...

    @property
    def trains_on_prefixes(self) -> bool:
        """True if training passes compute common prefixes of a row's sequences once: they have no noise."""
        ...

    @property
    def steps(self) -> int:
        """Number of optimizer steps done, including those before a resume."""
        ...

    def train_step(
        self, mini_batch: Sequence[RowT], objective: Objective[RowT], *also: tuple[Sequence, Objective]
    ) -> Metrics:
        """Runs forward and backward over this rank's rows of one batch, then one optimizer step.

        `also`: further (rows, objective) pairs of the same step. Their losses are added; each is normalized
        by the totals of its own rows.
        """
        ...

    def forward_backward(self, *streams: tuple[Sequence, Objective]) -> Metrics:
        """Adds the gradients of the streams' losses, each a pair (rows, objective), to those since the last
        optimizer step. Returns the objectives' metrics. Raises UsageError where the backend can add up only
        the gradients of one call."""
        ...

    def optim_step(self) -> Metrics:
        """Takes one optimizer step with the gradients since the last one; `lr` and `grad_norm` of it."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Returns a copy of the unsharded gradient of each trained weight, by its name in the model. Call it
        from `before_step`."""
        ...

    def evaluate(self, rows: Sequence[RowT], objective: Objective[RowT]) -> Metrics:
        """Returns the objective's metrics over all rows of all ranks. Computes no gradients."""
        ...

    def forward(self, rows: Sequence[RowT], read: Callable[[Callable, RowT], Tensor]) -> list[Tensor]:
        """Returns `read(model, row)` for each of this rank's rows, on the CPU. `rows` must not be empty."""
        ...

    def row_memory(self, num_tokens: int, with_entropy: bool = False) -> RankMemory:
        """Estimates this rank's peak memory in an optimizer step whose longest row has `num_tokens` tokens.
        `with_entropy`: the loss has an entropy bonus."""
        ...

    def weights(self, bucket_bytes: int = ..., part: Part = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yields (checkpoint name, unsharded tensor) of the model. Gathers about `bucket_bytes` at a time."""
        ...

    def weight_metadata(self, part: Part = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Returns (name, dtype, unsharded shape) of each tensor that `weights` yields."""
        ...

    def close(self) -> None:
        """Gives up what would keep the model in memory when nothing else refers to it. The engine takes no
        steps afterwards."""
        ...

    def random_adapter(self, seed: int) -> AbstractContextManager[None]:
        """Replaces the adapters by random ones within the context, and restores them afterwards."""
        ...

    def check_finite(self, *, states: bool = True) -> None:
        """Raises RunError on every rank where the weights of one are not finite; with `states` also where
        anything else is not that a checkpoint holds."""
        ...

    def save_checkpoint(self, folder: str, tag: str, state: dict, *, later: bool = False) -> None:
        """Writes a checkpoint of the model and of `state`. With `later` it is copied to host memory, and
        written in the background until `finish_checkpoint`."""
        ...

    @property
    def has_written(self) -> bool:
        """True if `finish_checkpoint` would not wait for this rank. Not collective."""
        ...

    def finish_checkpoint(self) -> None:
        """Waits for the checkpoint that is being written, if there is one. Raises RunError on all ranks if
        one failed to write."""
        ...

    def load_checkpoint(self, folder: str, tag: str) -> dict:
        """Restores weights, optimizer and learning rate schedule. Returns the `state` that was saved with
        them."""
        ...

    def export(self, folder: str) -> None:
        """Writes the model in Hugging Face format; of a model with an adapter, only the adapter."""
        ...

    def offload(self) -> None:
        """Moves everything that only optimizer steps need to the CPU, until `reload`."""
        ...

    def reload(self) -> None: ...


class Pending(Protocol[ResultT]):
    """A result that is still being computed."""

    def result(self) -> ResultT:
        """Waits for the work and returns its result, or raises its exception."""
        ...


class ModelRanks(Protocol):
    """All ranks of one model, as the controller uses them."""

    def forward(self, batch: Batch) -> Pending[np.ndarray]:
        """Returns (A,) float32: log-probs of a policy, values of a critic."""
        ...


class TrainableRanks(ModelRanks, Protocol):
    """All ranks of one model in training."""

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks (or groups of ranks that share rows) with different samples."""
        ...

    @property
    def num_updates(self) -> int:
        """Number of calls of `update`, including those before a resume. It is the seed of the samples'
        order."""
        ...

    def update(
        self, batch: Batch, schedule: Schedule, kl_coef: float, is_fresh: bool = True
    ) -> Pending[Updated]:
        """Takes the optimizer steps of `schedule` on a batch with advantages. A batch without log-probs has
        exactly one step."""
        ...

    def save_checkpoint(self, tag: str, state: dict) -> Pending[None]:
        """Writes a checkpoint of the model and of `state`. With --ckpt.async_save it is written in the
        background until `finish_checkpoint`."""
        ...

    def has_written(self) -> Pending[bool]:
        """Tells whether `finish_checkpoint` would return without waiting."""
        ...

    def finish_checkpoint(self) -> Pending[None]:
        """Waits for the checkpoint that is being written, if there is one. Raises RunError if it could not be
        written."""
        ...

    def load_checkpoint(self, tag: str) -> Pending[dict]: ...

    def export(self, folder: str) -> Pending[None]: ...


PolicyT = TypeVar("PolicyT", bound=TrainableRanks, contravariant=True)


class Rollout(Protocol[PolicyT]):
    """All rollout engines of a run. Only `next_group` and `Pending.result` block. PolicyT: type of the policy
    whose weights `sync` accepts."""

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        """Requests the samples of `prompts`, with the sampling parameters of training or of evaluation."""
        ...

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        """Returns the next group whose samples have all finished and have rewards. Raises RuntimeError if no
        prompt is in flight, and after `timeout` seconds an error that names the prompts in flight."""
        ...

    def sync(self, policy: PolicyT, version: int) -> Pending[Metrics]:
        """Sends the policy's current weights to every engine, and checks that the engines compute with
        them."""
        ...
