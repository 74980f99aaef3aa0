"""Rows of tensors, each of which one forward pass reads: sequences behind each other, with what an objective
needs of them.

In supervised learning a dataset consists of Samples, Pairs, UnpairedExamples or Steps (solutions with
labelled steps), and one forward pass reads a PackedRow, PairRow, UnpairedRow or StepsRow; in RL, an
ExperienceRow. types.py names the shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from openrlhf.types import Batch, Image, as_tensor, images_of, not_none


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A dataset row of supervised learning: one sequence, and a mask of the tokens that have a loss."""

    token_ids: Tensor  # (L,) int64
    action_mask: Tensor  # (L,) bool; False at 0, because nothing predicts the first token
    images: tuple[Image, ...] = ()
    """Images in the order of their tokens."""

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class LossNorm:
    """The denominators of a loss: totals of one optimizer step over all its rows and ranks, counted before
    the first backward pass. Dividing by them makes a loss independent of micro-batch size, packing,
    accumulation and number of ranks."""

    num_tokens: float
    """Number of actions."""
    num_sequences: float
    """Number of sequences with at least one action."""
    prompt_tokens: Tensor | None = None
    """Number of actions after each prompt, by `ExperienceRow.prompts`; None if no loss reads it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """Concatenated sequences without padding. Positions restart at each sequence, and attention never crosses
    a boundary between sequences."""

    token_ids: Tensor  # (N,) int64
    position_ids: Tensor  # (N,) int64
    action_mask: Tensor  # (N,) bool
    actions: Tensor  # (A,) int64 indices of True in `action_mask`, computed on the CPU: no device sync
    lengths: tuple[int, ...]  # B entries
    images: tuple[tuple[Image, ...], ...] = ()  # B entries; empty where no sequence has any
    kept_ids: Tensor | None = None  # (A, K) int64, `Nuclei.padded`; None: no truncated sampling
    log_masses: Tensor | None = None  # (A,) `Nuclei.log_masses`; None: no truncated sampling
    routing: Tensor | None = None  # (N, M, K), see Trajectory.routing; None: routers choose
    temperatures: Tensor | None = None  # (A,) `Batch.temperatures`; None: the same for all
    host: "PackedRow | None" = None
    """The row before it was copied to a device, for what is computed from token ids on the CPU."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """Packs samples into one row. `samples` must not be empty."""
        action_mask = torch.cat([s.action_mask for s in samples])
        return cls(
            token_ids=torch.cat([s.token_ids for s in samples]),
            position_ids=torch.cat([torch.arange(s.length) for s in samples]),
            action_mask=action_mask,
            actions=action_mask.nonzero()[:, 0],
            lengths=tuple(s.length for s in samples),
            images=images_of(sample.images for sample in samples),
        )

    @classmethod
    def from_batch(cls, batch: Batch) -> Self:
        """Converts a batch to a row. Returns a dummy row if the batch is empty."""
        if not len(batch):
            return cls.empty()
        return cls(
            token_ids=torch.from_numpy(batch.token_ids.astype(np.int64)),
            position_ids=torch.cat([torch.arange(length) for length in batch.lengths]),
            action_mask=torch.from_numpy(batch.action_mask),
            actions=torch.from_numpy(batch.action_mask.nonzero()[0]),
            lengths=tuple(batch.lengths.tolist()),
            images=batch.images,
            kept_ids=None if batch.kept is None else torch.from_numpy(batch.kept.padded()),
            log_masses=None if batch.kept is None else torch.from_numpy(batch.kept.log_masses),
            routing=as_tensor(batch.routing),
            temperatures=as_tensor(batch.temperatures),
        )

    @classmethod
    def empty(cls) -> Self:
        """Returns a dummy row without loss. A rank that has fewer rows than others runs it, so that all ranks
        call the same collectives."""
        two = torch.zeros(2, dtype=torch.int64)
        return cls(
            token_ids=two,
            position_ids=torch.arange(2),
            action_mask=two.bool(),
            actions=two[:0],
            lengths=(2,),
        )

    @property
    def num_actions(self) -> Tensor:
        """(B,) number of actions of each sequence."""
        return torch.stack([mask.sum() for mask in self.action_mask.split(self.lengths)])

    @property
    def num_tokens(self) -> int:
        """Number of actions."""
        return len(self.actions)

    @property
    def num_sequences(self) -> int:
        """Number of sequences with at least one action."""
        return int((self.num_actions > 0).sum())

    def to(self, device: torch.device | str) -> Self:
        moved = _to(replace(self, host=None), device)
        is_copy = moved.token_ids.device != self.token_ids.device
        return replace(moved, host=self if is_copy and self.host is None else self.host)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWithMore:
    """A packed row; subclasses add fields for its sequences or actions."""

    row: PackedRow

    def empty(self) -> Self:
        """Returns a dummy row without loss that has the same optional fields."""
        nothing = {
            f.name: PackedRow.empty() if isinstance(value, PackedRow) else value[:0]
            for f in fields(self)
            if (value := getattr(self, f.name)) is not None
        }
        return replace(self, **nothing)

    @property
    def num_tokens(self) -> int:
        """Number of actions."""
        return self.row.num_tokens

    @property
    def num_sequences(self) -> int:
        """Number of items over which a mean over sequences is taken."""
        return self.row.num_sequences

    def to(self, device: torch.device | str) -> Self:
        return _to(self, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two answers to one prompt. The actions of an answer are its tokens (DPO), or its last token, at which
    the score is read (reward models)."""

    chosen: Sample
    rejected: Sample
    margin: float = 0.0
    """Minimum by which the scores should differ."""
    ref_log_probs: Tensor | None = None  # (2,) of chosen and rejected answer; None if not precomputed


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRow(RowWithMore):
    """Packed pairs, in the order chosen, rejected, chosen, rejected, ..."""

    margins: Tensor  # (P,) float32, P pairs
    ref_log_probs: Tensor | None = None  # (2 P,) of each answer; None if not precomputed

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Self:
        """Packs pairs into one row. `pairs` must not be empty; either all or none of them have reference
        log-probs."""
        known = pairs[0].ref_log_probs is not None
        return cls(
            row=PackedRow.of([sample for pair in pairs for sample in (pair.chosen, pair.rejected)]),
            margins=torch.tensor([pair.margin for pair in pairs], dtype=torch.float32),
            ref_log_probs=torch.cat([not_none(pair.ref_log_probs) for pair in pairs]) if known else None,
        )

    def by_pair(self, x: Tensor) -> Tensor:
        """Reshapes one value per sequence, (B,), to (P, 2): chosen, rejected."""
        return x[: 2 * len(self.margins)].view(-1, 2)

    @property
    def num_sequences(self) -> int:
        """Number of pairs."""
        return len(self.margins)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpairedExample:
    """One answer labelled good or bad, for KTO."""

    sample: Sample
    mismatched: Sample
    """The same prompt with another prompt's answer, on which the KL between policy and reference is
    estimated."""
    desirable: bool
    ref_log_probs: Tensor | None = None  # (2,) of answer and mismatched answer; None if not precomputed


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpairedRow(RowWithMore):
    """Packed unpaired examples."""

    mismatched: PackedRow
    desirable: Tensor  # (B,) bool
    ref_log_probs: Tensor | None = None  # (B,) None if not precomputed
    ref_mismatched: Tensor | None = None  # (B,) reference log-probs of `mismatched`; None if not precomputed

    @classmethod
    def of(cls, examples: Sequence[UnpairedExample]) -> Self:
        """Packs examples into one row. `examples` must not be empty; either all or none of them have
        reference log-probs."""
        known = examples[0].ref_log_probs is not None
        ref = torch.stack([not_none(e.ref_log_probs) for e in examples]) if known else None
        return cls(
            row=PackedRow.of([e.sample for e in examples]),
            mismatched=PackedRow.of([e.mismatched for e in examples]),
            desirable=torch.tensor([e.desirable for e in examples]),
            ref_log_probs=None if ref is None else ref[:, 0],
            ref_mismatched=None if ref is None else ref[:, 1],
        )

    @property
    def num_sequences(self) -> int:
        return len(self.desirable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """A solution with a label for each step, for process reward models. Its actions are the placeholders at
    the ends of steps; a prediction is read at the placeholder itself."""

    sample: Sample
    labels: Tensor  # (A,) int64 token ids, or float32 probabilities of the first reward token


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsRow(RowWithMore):
    """Packed solutions with labelled steps."""

    labels: Tensor  # (A,) int64 or float32

    @classmethod
    def of(cls, solutions: Sequence[Steps]) -> Self:
        """Packs solutions into one row. `solutions` must not be empty."""
        return cls(
            row=PackedRow.of([s.sample for s in solutions]), labels=torch.cat([s.labels for s in solutions])
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperienceRow(RowWithMore):
    """A packed batch with everything that an update of policy or critic reads. A column is (A,) unless it
    says otherwise."""

    old_log_probs: Tensor | None  # (A,) None: equal to the policy's own, or not read
    advantages: Tensor  # (A,)
    returns: Tensor  # (A,)
    rollout_log_probs: Tensor  # (A,)
    staleness: Tensor | None = None  # (A,) None: all 0
    ref_log_probs: Tensor | None = None  # (A,) None without a reference model
    values: Tensor | None = None  # (A,) None without a critic
    prompts: Tensor | None = None  # (A,) int32, number of the prompt; None if no loss reads it
    likely_ids: Tensor | None = None  # (A, K) int64 of the sampler's likely tokens; None: not recorded
    likely_log_probs: Tensor | None = None  # (A, K) their log-probs under the sampler

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Converts a batch with advantages and returns to a row."""
        return cls(
            row=PackedRow.from_batch(batch),
            old_log_probs=as_tensor(batch.log_probs),
            advantages=torch.from_numpy(not_none(batch.advantages)),
            returns=torch.from_numpy(not_none(batch.returns)),
            rollout_log_probs=torch.from_numpy(batch.rollout_log_probs),
            staleness=as_tensor(batch.staleness),
            ref_log_probs=as_tensor(batch.ref_log_probs),
            values=as_tensor(batch.values),
            prompts=as_tensor(batch.prompts),
            **({} if batch.likely is None else _likely(batch.likely)),
        )


def _likely(tokens: np.ndarray) -> dict[str, Tensor]:
    """Returns the columns of (A, K) `LIKELY`."""
    ids, log_probs = tokens["id"].astype(np.int64), np.ascontiguousarray(tokens["log_prob"])
    return {"likely_ids": torch.from_numpy(ids), "likely_log_probs": torch.from_numpy(log_probs)}


RecordT = TypeVar("RecordT", bound=PackedRow | RowWithMore)


def _to(record: RecordT, device: torch.device | str) -> RecordT:
    """Returns the record with its tensors, including those of nested packed rows, on `device`."""
    moved = {
        f.name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value.to(device)
        for f in fields(record)
        if isinstance(value := getattr(record, f.name), Tensor | PackedRow)
    }
    return replace(record, **moved)
