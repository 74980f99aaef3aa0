"""The records that cross a module or a process. Each is written once, by one stage, and never changed.

    Prompt -> Turn -> Episode -> Trajectory -> PromptGroup -> Batch -> ForwardOutputs -> Credit
           -> ExperienceRow

    Prompt          a row of the dataset, as the policy will read it
    Turn            one request to an engine and its answer, as the engine recorded it
    Episode         what an agent did for one sample of a prompt: its turns and its reward
    Trajectory      a token sequence to train on: an episode, or a part of one
    PromptGroup     the trajectories of a prompt's samples: what a rollout hands out
    Batch           sequences laid end to end in numpy arrays: a whole step, a rank's part, a micro-batch
    ForwardOutputs  log-probs and values of a batch's actions, by every model
    Credit          advantages and returns of a batch's actions
    ExperienceRow   a batch as tensors: what one forward pass of an update reads

In supervised learning a dataset has Samples, Pairs, UnpairedExamples or solutions with Steps; one forward
pass reads a PackedRow, PairRow, UnpairedRow or StepsRow.

Shapes: B sequences, L tokens in a sequence, N tokens in a packed row or a batch (the sum of L), A actions,
R runs of equal values, T turns, S tokens of all kept sets, M layers of which each token goes to K experts.
An action is a token that the policy chose and is trained on; in supervised learning, a token with loss. A
(L,) or (N,) field speaks of the token at that index. A (A,) field has one entry for each True of the matching
mask, in order: prompts, environment feedback and padding have no entry anywhere, so nothing can train on
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Self, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

Metrics = dict[str, float]

Purpose = Literal["train", "eval"]
"""What samples are for."""
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

Schedule = list[list[list[int]]]
"""[optimizer step][rank] -> which sequences of a batch the rank learns from."""


class Outcome(StrEnum):
    """How an episode ended. Everything but OK carries no reward, is not trained on, and is counted."""

    OK = "ok"
    ENV_ERROR = "env_error"
    """What the user's agent or environment raised."""
    REWARD_ERROR = "reward_error"
    TIMED_OUT = "timed_out"
    """The episode took longer than its limit."""
    ABORTED = "aborted"
    """The engine gave the last turn up."""


@dataclass(frozen=True, slots=True)
class Image:
    """A picture, as its file has it."""

    reference: str
    """What people and the journal call it: a path, a URL, or the digest of its bytes."""
    data: bytes = field(repr=False)
    """Of the file: PNG, JPEG, WebP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    prompt_id: int
    """Row of the prompt dataset. Samples with the same id and epoch form a group."""
    text: str
    """The prompt as the policy reads it: templates applied."""
    label: Any = ""
    """The `label_key` column, handed to rewards and environments untouched."""
    source: str = "default"
    """The `datasource` column: evaluation reports each source on its own."""
    epoch: int = 0
    """The pass over the prompts, from 0."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The conversation that a chat template made the text of, for models with another template."""
    images: tuple[Image, ...] = ()
    """In the order of their placeholders in `text`."""
    num_tokens: int = 0
    """As many as the policy reads, those of images included. 0: nobody has counted them."""


def _restore(prompt: Prompt, state: Sequence[Any]) -> None:
    """From a checkpoint, whose prompts may lack the last fields."""
    values = dict(zip([f.name for f in fields(prompt)], state, strict=False))
    for f in fields(prompt):
        object.__setattr__(prompt, f.name, values.get(f.name, f.default))


Prompt.__setstate__ = _restore  # here, because some versions of Python replace what a class with slots has


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptSets:
    """The tokens that truncated sampling (top-p, top-k) kept, for each action: what else there is had
    probability 0. Where a kept set is too large to be recorded, the most likely of it."""

    ids: np.ndarray
    """(S,) int32: those of one action behind those of the one before it, each time the chosen one first."""
    counts: np.ndarray
    """(A,) int32, adding up to S. 0: the action was chosen from all tokens."""
    log_masses: np.ndarray
    """(A,) float32: log of the probability that the sampler gave these tokens together; 0 where they are all
    that it kept."""

    @classmethod
    def of_all_tokens(cls, num_actions: int) -> Self:
        return cls(
            ids=np.zeros(0, np.int32),
            counts=np.zeros(num_actions, np.int32),
            log_masses=np.zeros(num_actions, np.float32),
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """One behind the other. None where there are no parts."""
        if not parts:
            return None
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    def parts(self, places: Sequence[slice]) -> "list[KeptSets]":
        """Of the actions at each place: views."""
        borders = np.concatenate([[0], self.counts.cumsum()])
        return [
            KeptSets(
                ids=self.ids[borders[place.start] : borders[place.stop]],
                counts=self.counts[place],
                log_masses=self.log_masses[place],
            )
            for place in places
        ]

    def padded(self) -> np.ndarray:
        """(A, K) int64: each set as a row, filled up with its first token; -1 where it is that of all
        tokens."""
        first = np.full(len(self.counts), -1)
        some, starts = self.counts > 0, self.counts.cumsum() - self.counts
        first[some] = self.ids[starts[some]]
        rows = np.repeat(first[:, None], max(1, self.counts.max(initial=0)), axis=1)
        rows[np.arange(rows.shape[1]) < self.counts[:, None]] = self.ids
        return rows


def own_choice(routing: np.ndarray | Tensor) -> int:
    """Where a routing, uint8 or int16, has this in the place of an expert, the router chooses."""
    return 255 if routing.dtype.itemsize == 1 else 32767


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """One request to an engine, recorded by what every executor is given in its place: exact whatever the
    executor makes of it."""

    prompt_ids: np.ndarray
    """(P,) int32: all that the policy had read when it chose, an image as many tokens as the model reads of
    it."""
    action_ids: np.ndarray
    """(A,) int32"""
    log_probs: np.ndarray
    """(A,) float32, under the distribution that was sampled from."""
    weight_versions: np.ndarray
    """(R, 2) int32, see `runs`."""
    finish_reason: str
    """The engine's word for why it ended: stop, length or abort."""
    seed: int
    kept: KeptSets | None = None
    """What the actions were chosen from. None: all tokens."""
    routing: np.ndarray | None = None
    """(P + A, M, K) uint8 or int16: the experts that read each token in each layer, for the last one
    `own_choice`, because nobody has read it yet. None: not known."""
    images: tuple[Image, ...] = ()
    """That the policy had seen, in the order of their tokens."""
    reward: float | None = None
    """What the turn itself earned, of the episode's reward. None: not known."""

    @property
    def num_actions(self) -> int:
        return len(self.action_ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Episode:
    """What became of one sample of a prompt."""

    prompt: Prompt
    sample_index: int
    turns: list[Turn]
    seed: int
    """Of the first turn; those of the others follow from it."""
    reward: float | None
    """None when the outcome is not OK."""
    score: float | None = None
    """What filtering and evaluation look at. None when the outcome is not OK."""
    truncated: bool | None = None
    """What the executor says of it. None: whether the last turn ran out of tokens."""
    outcome: Outcome = Outcome.OK
    error: str = ""
    """Why the outcome is not OK."""
    extra_logs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One sequence of an episode. Most episodes have one; where an agent has rewritten its history, a new
    one begins."""

    prompt: Prompt
    sample_index: int
    """Which of the prompt's samples this is."""
    part: int = 0
    """Which of its episode's trajectories this is. All have the episode's reward."""
    token_ids: np.ndarray
    """(L,) int32: prompt, then actions and feedback in the order they came. An image is as many tokens as the
    model reads of it."""
    action_mask: np.ndarray
    """(L,) bool: True where the policy chose the token."""
    rollout_log_probs: np.ndarray
    """(A,) float32, from the sampler, under the distribution it sampled from."""
    weight_versions: np.ndarray
    """(R, 2) int32: version of the weights that chose the next actions, and how many; see `runs`."""
    kept: KeptSets | None = None
    """What the actions were chosen from. None: all tokens."""
    routing: np.ndarray | None = None
    """(L, M, K) uint8 or int16: the engine's experts for each token in each layer, or `own_choice`. None:
    not known."""
    images: tuple[Image, ...] = ()
    """In the order of their tokens: of the prompt, and of feedback."""
    turn_starts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """(T,) int32: the index in `token_ids` of each turn's first action."""
    turn_rewards: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """(T,) float32: what each turn earned, of the reward. Empty where it is not known."""
    reward: float | None
    """None when the outcome is not OK."""
    score: float | None = None
    """What filtering and evaluation look at. None when the outcome is not OK."""
    outcome: Outcome = Outcome.OK
    error: str = ""
    """Why the outcome is not OK."""
    finish_reason: str = "stop"
    """The engine's word for why the last turn ended: stop, length or abort."""
    truncated: bool = False
    """The last turn ran out of tokens."""
    seed: int = 0
    extra_logs: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def is_first(self) -> bool:
        """Of its episode, which it stands for where episodes are counted."""
        return self.part == 0

    @property
    def group(self) -> tuple[int, int]:
        """Equal for the samples of one prompt in one pass over the prompts."""
        return self.prompt.epoch, self.prompt.prompt_id

    @property
    def sample(self) -> tuple[int, int, int]:
        """Equal for the parts of one episode."""
        return *self.group, self.sample_index

    @property
    def num_actions(self) -> int:
        return len(self.rollout_log_probs)

    @property
    def action_ids(self) -> np.ndarray:
        """(A,) int32: what the policy chose."""
        return self.token_ids[self.action_mask]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first action; all where there is none."""
        return int(self.action_mask.argmax()) if self.num_actions else len(self.token_ids)


def runs(values: Sequence[int] | np.ndarray) -> np.ndarray:
    """(A,) -> (R, 2) int32: each value, and how often it follows itself."""
    values = np.asarray(values, np.int32)
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return np.stack([values[starts], np.diff(starts, append=len(values))], axis=1).astype(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptGroup:
    """The samples of one prompt, in their order. They travel as one packed batch: an array for each field and
    not one for each sample."""

    prompt: Prompt
    trajectories: list[Trajectory]

    def __reduce__(self) -> tuple:
        arrays = {name: [getattr(t, name) for t in self.trajectories] for name in _ARRAYS}
        packed = {name: (np.concatenate(a), [len(x) for x in a]) for name, a in arrays.items() if a}
        facts = [tuple(getattr(t, name) for name in _FACTS) for t in self.trajectories]
        return _unpack_group, (
            self.prompt,
            packed,
            facts,
            kept_of(self.trajectories),
            routing_of(self.trajectories),
            _FACTS,
        )


Work = np.ndarray
"""(P + 1,) int64: samples for each of the P purposes, and the tokens of their prompts together."""


def no_work() -> Work:
    return np.zeros(len(PURPOSES) + 1, np.int64)


def work_of(prompt: Prompt, purpose: Purpose, num_samples: int) -> Work:
    samples = [num_samples * (p == purpose) for p in PURPOSES]
    return np.array([*samples, num_samples * prompt.num_tokens], np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampled:
    """A group that an engine has finished."""

    group: PromptGroup
    done: Work
    """What the engine has finished since it started, in groups that have samples left too."""


_ARRAYS = ("token_ids", "action_mask", "rollout_log_probs", "weight_versions", "turn_starts", "turn_rewards")
_FACTS = tuple(f.name for f in fields(Trajectory) if f.name not in ("prompt", "kept", "routing", *_ARRAYS))
_FACTS_OF_VERSION_1 = (
    *("sample_index", "part", "images", "reward", "score", "outcome", "error", "finish_reason", "truncated"),
    *("seed", "extra_logs"),
)
"""Checkpoints of version 1 do not name what they hold."""


def _unpack_group(
    prompt: Prompt,
    packed: Mapping[str, tuple],
    facts: Sequence[tuple],
    kept: KeptSets | None = None,
    routing: np.ndarray | None = None,
    names: Sequence[str] = _FACTS_OF_VERSION_1,
) -> PromptGroup:
    """Returns a group whose arrays are views of those that travelled. `facts` has the values of `names`."""
    columns = [
        [whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        for whole, sizes in packed.values()
    ]
    sets: Sequence[KeptSets | None] = [None] * len(facts)
    if kept is not None:
        num_actions = np.array(packed["rollout_log_probs"][1])
        sets = kept.parts(_slices(num_actions, range(len(facts))))
    routings: Sequence[np.ndarray | None] = [None] * len(facts)
    if routing is not None:
        routings = np.split(routing, np.cumsum(packed["token_ids"][1])[:-1])
    return PromptGroup(
        prompt=prompt,
        trajectories=[
            Trajectory(
                prompt=prompt,
                kept=of_actions,
                routing=of_tokens,
                **dict(zip(packed, arrays, strict=True)),
                **dict(zip(names, values, strict=True)),
            )
            for *arrays, of_actions, of_tokens, values in zip(*columns, sets, routings, facts, strict=True)
        ],
    )


def kept_of(parts: "Sequence[Turn | Trajectory]") -> KeptSets | None:
    """Of all their actions. None: each was chosen from all tokens."""
    if all(part.kept is None for part in parts):
        return None
    return KeptSets.joined([part.kept or KeptSets.of_all_tokens(part.num_actions) for part in parts])


def routing_of(trajectories: Sequence[Trajectory]) -> np.ndarray | None:
    """(N, M, K) of all their tokens. None: of none it is known."""
    known = next((t.routing for t in trajectories if t.routing is not None), None)
    if known is None:
        return None
    nothing = lambda t: unrouted(len(t.token_ids), known)
    return np.concatenate([nothing(t) if t.routing is None else t.routing for t in trajectories])


def unrouted(num_tokens: int, like: np.ndarray) -> np.ndarray:
    """(L, M, K): every router chooses."""
    return np.full_like(like, own_choice(like), shape=(num_tokens, *like.shape[1:]))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Sequences laid end to end: a whole rollout, what a rank gets of it, and what a micro-batch is.

    The optional columns are what the stages of a step know of every action.
    """

    token_ids: np.ndarray  # (N,) int32
    action_mask: np.ndarray  # (N,) bool; False at the first token of a sequence, because nothing predicts it
    lengths: np.ndarray  # (B,) int64
    num_actions: np.ndarray  # (B,) int64
    images: tuple[tuple[Image, ...], ...] = ()  # B entries; empty where no sequence has any
    kept: KeptSets | None = None  # of all actions; None: each was chosen from all tokens
    routing: np.ndarray | None = None  # (N, M, K) of all tokens, as a trajectory's; None: routers choose
    rollout_log_probs: np.ndarray  # (A,) float32, from the sampler
    staleness: np.ndarray | None = None  # (A,) int32, updates by which the sampler was behind; None: all 0
    log_probs: np.ndarray | None = None  # (A,) of the policy before the update; None: not known before it
    ref_log_probs: np.ndarray | None = None  # (A,) None without a reference model
    values: np.ndarray | None = None  # (A,) None without a critic
    advantages: np.ndarray | None = None  # (A,)
    returns: np.ndarray | None = None  # (A,)

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], version: int | None = None) -> Self:
        """`trajectories` must not be empty. `version`: of the weights that will learn from them; None: of
        those that sampled."""
        return cls(
            token_ids=np.concatenate([t.token_ids for t in trajectories]),
            action_mask=np.concatenate([t.action_mask for t in trajectories]),
            lengths=np.array([len(t.token_ids) for t in trajectories]),
            num_actions=np.array([t.num_actions for t in trajectories]),
            images=_images(trajectories),
            kept=kept_of(trajectories),
            routing=routing_of(trajectories),
            rollout_log_probs=np.concatenate([t.rollout_log_probs for t in trajectories]),
            staleness=None if version is None else _staleness(trajectories, version),
        )

    def __len__(self) -> int:
        """B"""
        return len(self.lengths)

    def credited(self, outputs: "ForwardOutputs", credit: "Credit") -> Self:
        """With all that an update reads."""
        return replace(
            self,
            log_probs=outputs.log_probs,
            ref_log_probs=outputs.ref_log_probs,
            values=outputs.values,
            advantages=credit.advantages,
            returns=credit.returns,
        )

    def select(self, indices: Sequence[int]) -> Self:
        """The sequences at `indices`, in that order, with every column."""
        of_tokens = _slices(self.lengths, indices)
        of_actions = _slices(self.num_actions, indices)
        actions = {f.name: _gather(getattr(self, f.name), of_actions) for f in fields(self)[7:]}
        return replace(
            self,
            token_ids=_gather(self.token_ids, of_tokens),
            action_mask=_gather(self.action_mask, of_tokens),
            lengths=self.lengths[list(indices)],
            num_actions=self.num_actions[list(indices)],
            images=tuple(self.images[i] for i in indices) if self.images else (),
            kept=None if self.kept is None else KeptSets.joined(self.kept.parts(of_actions)),
            routing=_gather(self.routing, of_tokens),
            **actions,
        )

    def put_together(self, parts: Sequence[Sequence[int]], answers: Sequence[np.ndarray]) -> np.ndarray:
        """Joins what was computed for the actions of each part, `select(part)`, to one (A,) array of this
        batch."""
        whole = np.empty(int(self.num_actions.sum()), answers[0].dtype)
        for part, answer in zip(parts, answers, strict=True):
            start = 0
            for place in _slices(self.num_actions, part):
                whole[place] = answer[start : (start := start + place.stop - place.start)]
        return whole


def _staleness(trajectories: Sequence[Trajectory], version: int) -> np.ndarray | None:
    """(A,) by how many updates the weights that chose each action are behind `version`. None: none is."""
    versions, counts = np.concatenate([t.weight_versions for t in trajectories]).T
    return np.repeat(version - versions, counts) if (versions != version).any() else None


def _images(sequences: Sequence["Trajectory | Sample"]) -> tuple[tuple[Image, ...], ...]:
    """Of each sequence; empty where none has any."""
    images = tuple(sequence.images for sequence in sequences)
    return images if any(images) else ()


def _slices(sizes: np.ndarray, indices: Sequence[int]) -> list[slice]:
    """Where the parts at `indices` are in a whole of parts of these sizes."""
    ends = sizes.cumsum()
    starts = ends - sizes
    return [slice(starts[i], ends[i]) for i in indices]


def _gather(whole: np.ndarray | None, places: Sequence[slice]) -> np.ndarray | None:
    if whole is None:
        return None
    return np.concatenate([whole[place] for place in places]) if places else whole[:0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardOutputs:
    """What the models say of every action of a batch."""

    log_probs: np.ndarray | None  # (A,) under the policy before this step's update; None: not asked for
    ref_log_probs: np.ndarray | None = None  # (A,) None without a reference model
    teacher_log_probs: np.ndarray | None = None  # (A,) None without a teacher
    values: np.ndarray | None = None  # (A,) None without a critic


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Credit:
    advantages: np.ndarray  # (A,) float32
    returns: np.ndarray  # (A,) float32


class Updated(NamedTuple):
    """What an update tells."""

    metrics: Metrics
    """Means over its optimizer steps."""
    first: list[int]
    """The sequences of the first optimizer step, which reads them before the policy changes."""
    log_probs: np.ndarray | None
    """(A,) of the actions of `first`, in that order, under the policy before the update. None where the batch
    brought them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A dataset row of supervised learning: one sequence with the tokens in question marked."""

    token_ids: Tensor  # (L,) int64
    action_mask: Tensor  # (L,) bool; False at 0, because nothing predicts the first token
    images: tuple[Image, ...] = ()
    """In the order of their tokens."""

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())

    @property
    def length(self) -> int:
        return len(self.token_ids)


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
    actions: Tensor  # (A,) int64, where `action_mask` is True: known before the row is on a device
    lengths: tuple[int, ...]  # B entries
    images: tuple[tuple[Image, ...], ...] = ()  # B entries; empty where no sequence has any
    kept_ids: Tensor | None = None  # (A, K) int64, `KeptSets.padded`; None: actions of all tokens
    log_masses: Tensor | None = None  # (A,) of the kept sets; None without any
    routing: Tensor | None = None  # (N, M, K) as a batch's

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """`samples` must not be empty."""
        action_mask = torch.cat([s.action_mask for s in samples])
        return cls(
            token_ids=torch.cat([s.token_ids for s in samples]),
            position_ids=torch.cat([torch.arange(s.length) for s in samples]),
            action_mask=action_mask,
            actions=action_mask.nonzero()[:, 0],
            lengths=tuple(s.length for s in samples),
            images=_images(samples),
        )

    @classmethod
    def of_batch(cls, batch: Batch) -> Self:
        """Without sequences: a dummy row."""
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
            routing=tensor_of(batch.routing),
        )

    @classmethod
    def empty(cls) -> Self:
        """Dummy row without loss: keeps collectives matched on ranks that have no row of their own."""
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
        """(B,) actions of each sequence."""
        return torch.stack([mask.sum() for mask in self.action_mask.split(self.lengths)])

    @property
    def num_tokens(self) -> int:
        return len(self.actions)

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
    """A solution with a label for each step, for process reward models. Its actions are the placeholders at
    the ends of steps; a prediction is read at the placeholder itself."""

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
    old_log_probs: Tensor | None  # (A,) None: the policy itself, or not read
    advantages: Tensor  # (A,)
    returns: Tensor  # (A,)
    rollout_log_probs: Tensor  # (A,)
    staleness: Tensor | None = None  # (A,) None: all 0
    ref_log_probs: Tensor | None = None  # (A,) None without a reference model
    values: Tensor | None = None  # (A,) None without a critic

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Of a batch with credit."""
        return cls(
            row=PackedRow.of_batch(batch),
            old_log_probs=tensor_of(batch.log_probs),
            advantages=torch.from_numpy(present(batch.advantages)),
            returns=torch.from_numpy(present(batch.returns)),
            rollout_log_probs=torch.from_numpy(batch.rollout_log_probs),
            staleness=tensor_of(batch.staleness),
            ref_log_probs=tensor_of(batch.ref_log_probs),
            values=tensor_of(batch.values),
        )


ValueT = TypeVar("ValueT")
RecordT = TypeVar("RecordT", bound=PackedRow | RowWithMore)


def present(value: ValueT | None) -> ValueT:
    """A field that may be None, where the configuration or the outcome says that it is not."""
    assert value is not None
    return value


def tensor_of(array: np.ndarray | None) -> Tensor | None:
    """A view of the column, where there is one."""
    return None if array is None else torch.from_numpy(array)


def _to(record: RecordT, device: torch.device | str) -> RecordT:
    """The record with its tensors, also those of packed rows in it, on `device`."""
    moved = {
        f.name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value.to(device)
        for f in fields(record)
        if isinstance(value := getattr(record, f.name), Tensor | PackedRow)
    }
    return replace(record, **moved)
