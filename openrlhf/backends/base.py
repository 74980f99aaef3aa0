"""Interfaces through which a trainer uses DeepSpeed, vLLM and Ray.

Methods of ModelRanks and TrainableRanks return a Pending result at once, so that work on different devices
overlaps. Models that share devices run one after the other, and are offloaded as needed
(cluster/engine_memory.py).
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from openrlhf.rows import LossNorm
from openrlhf.types import Batch, Metrics, Prompt, PromptGroup, Purpose, Schedule, Updated

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


class Trainable(Protocol):
    """One rank of a model in training, as the supervised loop uses it. `TrainedRank` of model_rank.py
    documents these methods, which are collective except `steps` and `has_written`."""

    @property
    def steps(self) -> int: ...

    def train_step(
        self, mini_batch: Sequence[RowT], objective: Objective[RowT], *also: tuple[Sequence, Objective]
    ) -> Metrics: ...

    def evaluate(self, rows: Sequence[RowT], objective: Objective[RowT]) -> Metrics: ...

    def save_checkpoint(self, folder: str, tag: str, state: dict, *, later: bool = False) -> None: ...

    @property
    def has_written(self) -> bool: ...

    def finish_checkpoint(self) -> None: ...

    def load_checkpoint(self, folder: str, tag: str) -> dict: ...


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
