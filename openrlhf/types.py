"""The records that cross a module or a process. Each is written once, by one stage, and never changed.

    Prompt -> Trajectory -> Sample -> Scores -> Credit -> Experience -> ExperienceRow

    Prompt         a dataset row, as the policy will read it
    Trajectory     what an executor returns: one finished (or failed) episode in plain values
    Sample         a trajectory as tensors: what models see
    Scores         what the models think of a sample
    Credit         what the algorithm makes of the scores
    Experience     the three together: all that an update needs of one sample
    ExperienceRow  experiences laid end to end in one packed row: what one forward pass reads

In supervised learning a dataset has Samples, Pairs, UnpairedExamples or solutions with Steps; one forward
pass reads a PackedRow, PairRow, UnpairedRow or StepsRow.

Shapes: B sequences, L tokens in a sequence, N tokens in a packed row (the sum of L), A actions.
An action is a token that the policy chose and is trained on; in supervised learning, a token with loss. A
(L,) or (N,) field speaks of the token at that index. A (A,) field has one entry for each True of the matching
mask, in order: prompts, environment feedback and padding have no entry anywhere, so nothing can train on
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

Metrics = dict[str, float]


class Outcome(StrEnum):
    """How an episode ended. Everything but OK carries no reward, is not trained on, and is counted."""

    OK = "ok"
    ENV_ERROR = "env_error"
    REWARD_ERROR = "reward_error"
    ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    prompt_id: int
    """Row of the prompt dataset. Samples with the same id and episode form a group."""
    text: str
    """The prompt as the policy reads it: templates applied."""
    label: Any = ""
    """The `label_key` column, handed to rewards and environments untouched."""
    source: str = "default"
    """The `datasource` column: evaluation reports each source on its own."""
    episode: int = 0
    """Which pass over the prompts this is."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The conversation that a chat template made the text of, for models with another template."""


def _restore(prompt: Prompt, state: Sequence[Any]) -> None:
    """From a checkpoint, whose prompts may lack the last fields."""
    values = dict(zip([f.name for f in fields(prompt)], state, strict=False))
    for f in fields(prompt):
        object.__setattr__(prompt, f.name, values.get(f.name, f.default))


Prompt.__setstate__ = _restore  # here, because some versions of Python replace what a class with slots has


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    prompt: Prompt
    sample_index: int
    """Which of the prompt's samples this is."""
    token_ids: list[int]
    """[L] prompt, then actions and feedback in the order they came."""
    action_mask: list[bool]
    """[L] True where the policy chose the token."""
    rollout_log_probs: list[float]
    """[A] from the sampler, under the distribution it sampled from."""
    weight_versions: list[int]
    """[A] version of the weights that chose each action."""
    reward: float | None
    """None when the outcome is not OK."""
    score: float | None = None
    """What filtering and evaluation look at. None when the outcome is not OK."""
    outcome: Outcome = Outcome.OK
    error: str = ""
    """Why the outcome is not OK."""
    finish_reason: str = "stop"
    """The sampler's word for why the last turn ended: stop, length or abort."""
    truncated: bool = False
    """The last turn ran out of tokens."""
    seed: int = 0
    extra_logs: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def num_actions(self) -> int:
        return len(self.rollout_log_probs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sequence with the tokens in question marked; the common currency of supervised learning and RL."""

    token_ids: Tensor  # (L,) int64
    action_mask: Tensor  # (L,) bool; False at 0, because nothing predicts the first token
    rollout_log_probs: Tensor | None = None  # (A,) float32, None in supervised learning

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        return cls(
            # By way of numpy, which reads lists several times faster.
            token_ids=torch.from_numpy(np.array(trajectory.token_ids, np.int64)),
            action_mask=torch.from_numpy(np.array(trajectory.action_mask, np.bool_)),
            rollout_log_probs=torch.from_numpy(np.array(trajectory.rollout_log_probs, np.float32)),
        )

    def without_actions(self) -> Self:
        """A stand-in of two tokens that nothing trains on, for a rank that got no sample of its own."""
        log_probs = self.rollout_log_probs
        return replace(
            self,
            token_ids=self.token_ids[:2],
            action_mask=torch.zeros_like(self.action_mask[:2]),
            rollout_log_probs=None if log_probs is None else log_probs[:0],
        )

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    log_probs: Tensor | None  # (A,) under the policy before this step's update; None: not known before it
    ref_log_probs: Tensor | None = None  # (A,) None without a reference model
    teacher_log_probs: Tensor | None = None  # (A,) None without a teacher
    values: Tensor | None = None  # (A,) None without a critic


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    advantages: Tensor  # (A,)
    returns: Tensor  # (A,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    sample: Sample
    scores: Scores
    credit: Credit

    def without_actions(self) -> Self:
        """A stand-in that nothing trains on, for a rank that got no experience of its own."""
        return replace(
            self,
            sample=self.sample.without_actions(),
            scores=_without_entries(self.scores),
            credit=_without_entries(self.credit),
        )


@dataclass(frozen=True, slots=True)
class LossNorm:
    """What a loss divides by: totals of one optimizer step over all its rows and ranks, known before the
    first backward. So a loss does not change with the micro-batch size, packing, accumulation or number of
    ranks."""

    num_tokens: float
    """Actions."""
    num_sequences: float
    """Sequences with at least one action."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """Sequences laid end to end without padding. Positions restart at each; attention never crosses a
    border."""

    token_ids: Tensor  # (N,) int64
    position_ids: Tensor  # (N,) int64
    action_mask: Tensor  # (N,) bool
    lengths: tuple[int, ...]  # B entries

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """`samples` must not be empty."""
        return cls(
            token_ids=torch.cat([s.token_ids for s in samples]),
            position_ids=torch.cat([torch.arange(s.length) for s in samples]),
            action_mask=torch.cat([s.action_mask for s in samples]),
            lengths=tuple(s.length for s in samples),
        )

    @classmethod
    def empty(cls) -> Self:
        """A row without actions: its loss is 0, and a rank that has run out of rows can still join a
        collective."""
        two = torch.zeros(2, dtype=torch.int64)
        return cls(token_ids=two, position_ids=torch.arange(2), action_mask=two.bool(), lengths=(2,))

    @property
    def num_actions(self) -> Tensor:
        """(B,) actions of each sequence."""
        return torch.stack([mask.sum() for mask in self.action_mask.split(self.lengths)])

    @property
    def num_tokens(self) -> int:
        return int(self.action_mask.sum())

    @property
    def num_sequences(self) -> int:
        return int((self.num_actions > 0).sum())

    def to(self, device: torch.device | str) -> Self:
        return _to(self, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWithMore:
    """A packed row; subclasses say more about its sequences or actions."""

    row: PackedRow

    def empty(self) -> Self:
        """A row without sequences to learn from, and with the same optional fields."""
        nothing = {
            f.name: PackedRow.empty() if isinstance(value, PackedRow) else value[:0]
            for f in fields(self)
            if (value := getattr(self, f.name)) is not None
        }
        return replace(self, **nothing)

    @property
    def num_tokens(self) -> int:
        """Actions."""
        return self.row.num_tokens

    @property
    def num_sequences(self) -> int:
        """What a mean over sequences counts."""
        return self.row.num_sequences

    def to(self, device: torch.device | str) -> Self:
        return _to(self, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two answers to one prompt. For a reward model an action is the last token, which carries the score; for
    DPO the answer's tokens."""

    chosen: Sample
    rejected: Sample
    margin: float = 0.0
    """By how much the scores shall differ at least."""
    ref_log_probs: Tensor | None = None  # (2,) of the chosen and the rejected answer, where known beforehand


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRow(RowWithMore):
    """Sequences: chosen, rejected, chosen, rejected, ..."""

    margins: Tensor  # (P,) float32, P pairs
    ref_log_probs: Tensor | None = None  # (2 P,) of each answer, None where they are not known beforehand

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Self:
        """`pairs` must not be empty, and must agree on whether reference log-probs are known."""
        known = pairs[0].ref_log_probs is not None
        return cls(
            row=PackedRow.of([sample for pair in pairs for sample in (pair.chosen, pair.rejected)]),
            margins=torch.tensor([pair.margin for pair in pairs], dtype=torch.float32),
            ref_log_probs=torch.cat([present(pair.ref_log_probs) for pair in pairs]) if known else None,
        )

    def by_pair(self, x: Tensor) -> Tensor:
        """(B,) one value for each sequence -> (P, 2): chosen, rejected."""
        return x[: 2 * len(self.margins)].view(-1, 2)

    @property
    def num_sequences(self) -> int:
        """Pairs."""
        return len(self.margins)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpairedExample:
    """One answer that is good or bad, for KTO."""

    sample: Sample
    mismatched: Sample
    """The same prompt with the answer to another one: what the KL between policy and reference is estimated
    on."""
    desirable: bool
    ref_log_probs: Tensor | None = None  # (2,) of the answer and the mismatched one, where known beforehand


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpairedRow(RowWithMore):
    mismatched: PackedRow
    desirable: Tensor  # (B,) bool
    ref_log_probs: Tensor | None = None  # (B,) None where they are not known beforehand
    ref_mismatched: Tensor | None = None  # (B,) likewise

    @classmethod
    def of(cls, examples: Sequence[UnpairedExample]) -> Self:
        """`examples` must not be empty, and must agree on whether reference log-probs are known."""
        known = examples[0].ref_log_probs is not None
        ref = torch.stack([present(e.ref_log_probs) for e in examples]) if known else None
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
    """A solution whose steps are judged, for process reward models. Its actions are the placeholders at the
    ends of steps; a prediction is read at the placeholder itself."""

    sample: Sample
    labels: Tensor  # (A,) int64 token ids, or float32 probabilities of the first reward token


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsRow(RowWithMore):
    labels: Tensor  # (A,) int64 or float32

    @classmethod
    def of(cls, solutions: Sequence[Steps]) -> Self:
        """`solutions` must not be empty."""
        return cls(
            row=PackedRow.of([s.sample for s in solutions]), labels=torch.cat([s.labels for s in solutions])
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperienceRow(RowWithMore):
    old_log_probs: Tensor | None  # (A,) None: the policy itself
    advantages: Tensor  # (A,)
    returns: Tensor  # (A,)
    rollout_log_probs: Tensor  # (A,)
    ref_log_probs: Tensor | None = None  # (A,) None without a reference model
    values: Tensor | None = None  # (A,) None without a critic

    @classmethod
    def of(cls, experiences: Sequence[Experience]) -> Self:
        """`experiences` must not be empty, and must agree on which optional fields they have."""
        scores = [e.scores for e in experiences]
        return cls(
            row=PackedRow.of([e.sample for e in experiences]),
            old_log_probs=joined([s.log_probs for s in scores]),
            advantages=torch.cat([e.credit.advantages for e in experiences]),
            returns=torch.cat([e.credit.returns for e in experiences]),
            rollout_log_probs=torch.cat([present(e.sample.rollout_log_probs) for e in experiences]),
            ref_log_probs=joined([s.ref_log_probs for s in scores]),
            values=joined([s.values for s in scores]),
        )


ValueT = TypeVar("ValueT")


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors end to end; None where there are none, which the first part tells."""
    return None if parts[0] is None else torch.cat([present(part) for part in parts])


def present(value: ValueT | None) -> ValueT:
    """A field that may be None, where the configuration or the outcome says that it is not."""
    assert value is not None
    return value


def _without_entries(record):
    """The record with every tensor emptied."""
    return replace(
        record, **{f.name: v[:0] for f in fields(record) if (v := getattr(record, f.name)) is not None}
    )


def _to(record, device):
    """The record with its tensors, also those of packed rows in it, on `device`."""
    moved = {
        f.name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value.to(device)
        for f in fields(record)
        if isinstance(value := getattr(record, f.name), Tensor | PackedRow)
    }
    return replace(record, **moved)
