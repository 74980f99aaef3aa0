"""The records that cross a module or a process. Each is written once, by one stage, and never changed.

    Prompt -> Turn -> Episode -> Trajectory -> PromptGroup -> Batch -> ExperienceRow

    Prompt          a row of the dataset, as the policy will read it
    Turn            one request to an engine and its answer, as the engine recorded it
    Episode         what an agent did for one sample of a prompt: its turns and its reward
    Trajectory      a token sequence to train on: an episode, or a part of one
    PromptGroup     the trajectories of a prompt's samples: what a rollout hands out
    Batch           sequences concatenated in numpy arrays: a whole step, a rank's part, a micro-batch;
                    models add their log-probs and values, the estimator adds advantages and returns
    ExperienceRow   a batch as tensors: what one forward pass of an update reads (rows.py)

Shapes: B sequences, L tokens in a sequence, N tokens in a packed row or a batch (the sum of L), A actions, R
runs of equal values, T turns, S tokens in all top-p/top-k nuclei, K most likely tokens of an action, M
layers in each of which a token is routed to K experts. An action is a token that the policy chose and is
trained on; in supervised learning, a token with loss. Entry i of an (L,) or (N,) field belongs to token i. An
(A,) field has one entry for each True of the action mask, in order: prompts, environment feedback and padding
have no entry in it, so nothing can train on them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Self, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

Metrics = dict[str, float]

Purpose = Literal["train", "eval"]
"""The purpose of samples: training or evaluation."""
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

Schedule = list[list[list[int]]]
"""`[optimizer step][rank]` -> indices of the sequences of a batch that the rank trains on."""


class Outcome(StrEnum):
    """The outcome of an episode. Only an episode with outcome OK has a reward and is trained on; the others
    are counted in the metrics."""

    OK = "ok"
    ENV_ERROR = "env_error"
    """The user's agent or environment raised an error."""
    REWARD_ERROR = "reward_error"
    """The reward source raised an error or returned an invalid value."""
    TIMED_OUT = "timed_out"
    """The episode took longer than its limit."""
    ABORTED = "aborted"
    """The engine aborted the last turn."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image in its encoded form."""

    reference: str
    """Name of the image in messages and the journal: a path, a URL, or the digest of its bytes."""
    data: bytes = field(repr=False)
    """Bytes of the image file: PNG, JPEG, WebP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A row of the prompt dataset in one pass over the dataset."""

    prompt_id: int
    """Row of the prompt dataset. Samples with the same id and epoch form a group."""
    text: str
    """The prompt as the policy reads it: templates applied."""
    label: Any = ""
    """The `label_key` column, passed unchanged to rewards and environments."""
    source: str = "default"
    """The `datasource` column: evaluation reports each source on its own."""
    epoch: int = 0
    """The pass over the prompts, from 0."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The conversation from which the chat template made `text`; reward models with another template render
    it again. None for a plain text."""
    images: tuple[Image, ...] = ()
    """Images in the order of their placeholders in `text`."""
    num_tokens: int = 0
    """Number of tokens that the policy reads, including those of images. 0: not counted."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools that the chat template lists in `text`, and that of a reward model does."""


_PROMPT_DEFAULTS = [(f.name, f.default) for f in fields(Prompt)]


def _restore(prompt: Prompt, state: Sequence[Any]) -> None:
    """Restores a prompt from a checkpoint. An older checkpoint may lack the last fields, which then get their
    defaults."""
    values = [*state, *(default for _, default in _PROMPT_DEFAULTS[len(state) :])]
    for (name, _), value in zip(_PROMPT_DEFAULTS, values, strict=True):
        object.__setattr__(prompt, name, value)


Prompt.__setstate__ = _restore  # set here: some versions of Python replace the method of a class with slots


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Nuclei:
    """The recorded top-p/top-k nucleus of each action: the tokens that truncated sampling kept. All other
    tokens had probability 0. If the nucleus is too large to record, only its most likely tokens are."""

    ids: np.ndarray
    """(S,) int32 token ids, action after action; the sampled token comes first in each nucleus."""
    counts: np.ndarray
    """(A,) int32 sizes of the nuclei, with sum S. 0: the action was sampled from the whole vocabulary."""
    log_masses: np.ndarray
    """(A,) float32 log of the total probability of the recorded tokens under the sampler; 0 if they are the
    whole nucleus."""

    @classmethod
    def for_all_tokens(cls, num_actions: int) -> Self:
        """Returns the record of actions that were all sampled from the whole vocabulary."""
        return cls(
            ids=np.zeros(0, np.int32),
            counts=np.zeros(num_actions, np.int32),
            log_masses=np.zeros(num_actions, np.float32),
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """Concatenates parts. Returns None for an empty sequence."""
        if not parts:
            return None
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    def parts(self, places: Sequence[slice]) -> "list[Nuclei]":
        """Returns, for each slice of actions, a view of their nuclei."""
        borders = np.concatenate([[0], self.counts.cumsum()])
        return [
            Nuclei(
                ids=self.ids[borders[place.start] : borders[place.stop]],
                counts=self.counts[place],
                log_masses=self.log_masses[place],
            )
            for place in places
        ]

    def padded(self) -> np.ndarray:
        """Returns (A, K) int64: each nucleus as a row, padded with its first token. The row of an action
        sampled from the whole vocabulary is all -1."""
        first = np.full(len(self.counts), -1)
        some, starts = self.counts > 0, self.counts.cumsum() - self.counts
        first[some] = self.ids[starts[some]]
        rows = np.repeat(first[:, None], max(1, self.counts.max(initial=0)), axis=1)
        rows[np.arange(rows.shape[1]) < self.counts[:, None]] = self.ids
        return rows


KeptSets = Nuclei  # the name in checkpoints of earlier versions


LIKELY = np.dtype([("id", np.int32), ("log_prob", np.float32)])
"""A likely token: its id, and its log-prob under the sampling distribution, which is -inf for a token that
top-p or top-k dropped."""


def own_choice(routing: np.ndarray | Tensor) -> int:
    """Returns the marker that replaces an expert's index where the router chooses the experts itself: 255 in
    a uint8 routing, 32767 in an int16 routing."""
    return 255 if routing.dtype.itemsize == 1 else 32767


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """One request to an engine and its answer. The `RecordingEngine` around the engine records both, so the
    record is exact whatever the executor does with the answer."""

    prompt_ids: np.ndarray
    """(P,) int32 token ids of the whole context, with one placeholder for each image token that the model
    reads."""
    action_ids: np.ndarray
    """(A,) int32 token ids of the sampled actions."""
    log_probs: np.ndarray
    """(A,) float32 log-probs under the sampling distribution."""
    weight_versions: np.ndarray
    """(R, 2) int32 runs of (weight version, number of actions); see `runs`."""
    finish_reason: str
    """The engine's finish reason: stop, length or abort."""
    seed: int
    """Seed of the request's random numbers."""
    kept: Nuclei | None = None
    """Top-p/top-k nucleus of the actions. None: the whole vocabulary."""
    likely: np.ndarray | None = None
    """(A, K) `LIKELY`, the K most likely tokens at each action. None: not recorded."""
    routing: np.ndarray | None = None
    """(P + A, M, K) uint8 or int16 experts of each token in each layer; `own_choice` for the last token,
    which no forward pass has read yet. None if the engine did not record it."""
    images: tuple[Image, ...] = ()
    """Images in the context, in the order of their tokens."""
    reward: float | None = None
    """The turn's share of the episode's reward. None if the executor does not report it."""

    @property
    def num_actions(self) -> int:
        return len(self.action_ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OneSample:
    """Fields that an episode shares with each of its sequences."""

    prompt: Prompt
    sample_index: int
    """Index of the sample among the prompt's samples."""
    seed: int = 0
    """Seed of the first turn; the seeds of later turns are derived from it."""
    reward: float | None
    """None when the outcome is not OK."""
    score: float | None = None
    """Score for dynamic filtering and evaluation. None when the outcome is not OK."""
    outcome: Outcome = Outcome.OK
    error: str = ""
    """Error message; empty when the outcome is OK."""
    extra_logs: dict[str, float] = field(default_factory=dict)
    """Further values from the reward source, logged by name."""
    extra_texts: dict[str, str] = field(default_factory=dict)
    """Texts from the reward source by name, such as a judge's answer."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Episode(OneSample):
    """One sample of a prompt: its turns and its reward."""

    turns: list[Turn]
    truncated: bool | None = None
    """True if the executor reports the answer as truncated. None: it counts as truncated if the last turn ran
    out of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory(OneSample):
    """One sequence of an episode. Most episodes have one sequence; each time an agent rewrites its history, a
    new sequence begins."""

    part: int = 0
    """Index of the sequence in its episode. All sequences of an episode carry the episode's reward."""
    token_ids: np.ndarray
    """(L,) int32 token ids: prompt, then actions and feedback in order, with one placeholder for each image
    token that the model reads."""
    action_mask: np.ndarray
    """(L,) bool, True where the policy chose the token."""
    rollout_log_probs: np.ndarray
    """(A,) float32 log-probs from the sampler, under its sampling distribution."""
    weight_versions: np.ndarray
    """(R, 2) int32 runs of (version of the weights that chose the actions, number of actions); see `runs`."""
    kept: Nuclei | None = None
    """Top-p/top-k nucleus of the actions. None: the whole vocabulary."""
    likely: np.ndarray | None = None
    """(A, K) `LIKELY`, the K most likely tokens at each action. None: not recorded."""
    routing: np.ndarray | None = None
    """(L, M, K) uint8 or int16 experts that the engine chose for each token in each layer, or `own_choice`.
    None if the engine did not record them."""
    images: tuple[Image, ...] = ()
    """Images of the prompt and of feedback, in the order of their tokens."""
    turn_starts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """(T,) int32 index in `token_ids` of each turn's first action."""
    turn_rewards: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """(T,) float32 share of each turn in the episode's reward. Empty if the executor does not report it."""
    finish_reason: str = "stop"
    """The engine's finish reason for the last turn: stop, length or abort."""
    truncated: bool = False
    """True if the executor reports the answer as truncated; without a report, if the last turn ran out of
    tokens."""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def is_first(self) -> bool:
        """True for the first sequence of an episode. Counts of episodes count these."""
        return self.part == 0

    @property
    def group(self) -> tuple[int, int]:
        """Key that is equal for the samples of one prompt in one pass over the prompts."""
        return self.prompt.epoch, self.prompt.prompt_id

    @property
    def sample(self) -> tuple[int, int, int]:
        """Key that is equal for all sequences of one episode."""
        return *self.group, self.sample_index

    @property
    def num_actions(self) -> int:
        return len(self.rollout_log_probs)

    @property
    def action_ids(self) -> np.ndarray:
        """(A,) int32 token ids of the sampled actions."""
        return self.token_ids[self.action_mask]

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first action; the whole length if there is no action."""
        return int(self.action_mask.argmax()) if self.num_actions else len(self.token_ids)


def runs(values: Sequence[int] | np.ndarray) -> np.ndarray:
    """Run-length encodes values, (A,) -> (R, 2) int32: each value and the length of its run."""
    values = np.asarray(values, np.int32)
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return np.stack([values[starts], np.diff(starts, append=len(values))], axis=1).astype(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptGroup:
    """The samples of one prompt, in order. When pickled, each field is one array for all samples instead of
    one array per sample."""

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
            join_nuclei(self.trajectories),
            join_routing(self.trajectories),
            _FACTS,
            join_likely(self.trajectories),
        )


Work = np.ndarray
"""(P + 1,) int64: the number of samples for each of the P purposes, then the sum of their prompts' tokens."""


def no_work() -> Work:
    """Returns zeros."""
    return np.zeros(len(PURPOSES) + 1, np.int64)


def count_work(prompt: Prompt, purpose: Purpose, num_samples: int) -> Work:
    """Returns the work of `num_samples` samples of a prompt."""
    samples = [num_samples * (p == purpose) for p in PURPOSES]
    return np.array([*samples, num_samples * prompt.num_tokens], np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampled:
    """A group that an engine has finished."""

    group: PromptGroup
    done: Work
    """Work that the engine has finished since it started, including finished samples of unfinished groups."""


_ARRAYS = ("token_ids", "action_mask", "rollout_log_probs", "weight_versions", "turn_starts", "turn_rewards")
_PACKED = ("prompt", "kept", "likely", "routing")
_FACTS = tuple(f.name for f in fields(Trajectory) if f.name not in (*_PACKED, *_ARRAYS))
_FACTS_OF_VERSION_1 = (
    *("sample_index", "part", "images", "reward", "score", "outcome", "error", "finish_reason", "truncated"),
    *("seed", "extra_logs"),
)
"""Names of the values in `facts` of a group from a version-1 checkpoint, which does not store them."""


def _unpack_group(
    prompt: Prompt,
    packed: Mapping[str, tuple],
    facts: Sequence[tuple],
    kept: Nuclei | None = None,
    routing: np.ndarray | None = None,
    names: Sequence[str] = _FACTS_OF_VERSION_1,
    likely: np.ndarray | None = None,
) -> PromptGroup:
    """Returns a group whose arrays are views of the packed arrays. `facts` has the values of the fields
    `names`, one entry per sample."""
    columns = [
        [whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        for whole, sizes in packed.values()
    ]
    sets: Sequence[Nuclei | None] = [None] * len(facts)
    tokens: Sequence[np.ndarray | None] = [None] * len(facts)
    of_actions = _slices(np.array(packed["rollout_log_probs"][1]), range(len(facts))) if facts else []
    if kept is not None:
        sets = kept.parts(of_actions)
    if likely is not None:
        tokens = [likely[place] for place in of_actions]
    routings: Sequence[np.ndarray | None] = [None] * len(facts)
    if routing is not None:
        routings = np.split(routing, np.cumsum(packed["token_ids"][1])[:-1])
    return PromptGroup(
        prompt=prompt,
        trajectories=[
            Trajectory(
                prompt=prompt,
                kept=nuclei,
                likely=most_likely,
                routing=of_tokens,
                **dict(zip(packed, arrays, strict=True)),
                **dict(zip(names, values, strict=True)),
            )
            for *arrays, nuclei, most_likely, of_tokens, values in zip(
                *columns, sets, tokens, routings, facts, strict=True
            )
        ],
    )


def join_nuclei(parts: "Sequence[Turn | Trajectory]") -> Nuclei | None:
    """Concatenates the top-p/top-k nuclei of all actions. Returns None if all were sampled from the whole
    vocabulary."""
    if all(part.kept is None for part in parts):
        return None
    return Nuclei.joined([part.kept or Nuclei.for_all_tokens(part.num_actions) for part in parts])


def join_likely(parts: "Sequence[Turn | Trajectory]") -> np.ndarray | None:
    """Concatenates the likely tokens of all actions, (A, K). Returns None if an action has none."""
    acted = [part for part in parts if part.num_actions]
    known = [part.likely for part in acted if part.likely is not None]
    return np.concatenate(known) if known and len(known) == len(acted) else None


def join_routing(trajectories: Sequence[Trajectory]) -> np.ndarray | None:
    """Returns the (N, M, K) routing of all tokens. None if no trajectory has one."""
    known = next((t.routing for t in trajectories if t.routing is not None), None)
    if known is None:
        return None
    nothing = lambda t: unrouted(len(t.token_ids), known)
    return np.concatenate([nothing(t) if t.routing is None else t.routing for t in trajectories])


def unrouted(num_tokens: int, like: np.ndarray) -> np.ndarray:
    """Returns an (L, M, K) routing filled with `own_choice`. `like` (N, M, K): a routing of the same
    model."""
    return np.full_like(like, own_choice(like), shape=(num_tokens, *like.shape[1:]))


ActionColumn = np.ndarray | None
"""A number for each action of a batch, (A,)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Concatenated sequences: a whole rollout, a rank's part of it, or a micro-batch.

    The forward passes of a step add the columns from `log_probs` to `values`, the estimator adds
    `advantages` and `returns`; until then they are None.
    """

    token_ids: np.ndarray  # (N,) int32
    action_mask: np.ndarray  # (N,) bool; False at the first token of a sequence, because nothing predicts it
    lengths: np.ndarray  # (B,) int64
    num_actions: np.ndarray  # (B,) int64
    images: tuple[tuple[Image, ...], ...] = ()  # B entries; empty where no sequence has any
    kept: Nuclei | None = None  # nuclei of all actions; None: all sampled from the whole vocabulary
    likely: np.ndarray | None = None  # (A, K) LIKELY, of the sampler; None: not recorded
    routing: np.ndarray | None = None  # (N, M, K), see Trajectory.routing; None: routers choose
    rollout_log_probs: np.ndarray  # (A,) float32, from the sampler
    staleness: ActionColumn = None  # (A,) int32, age of the sampler's weights in updates; None: all 0
    log_probs: ActionColumn = None  # (A,) of the policy before the update; None if not computed
    ref_log_probs: ActionColumn = None  # (A,) None without a reference model
    teacher_log_probs: ActionColumn = None  # (A,) None without a teacher; not read by updates
    values: ActionColumn = None  # (A,) None without a critic
    prompts: ActionColumn = None  # (A,) int32, from 0: number of the prompt; None if no loss reads it
    temperatures: ActionColumn = None  # (A,) float64, of the sampler; None: that of the run
    advantages: ActionColumn = None  # (A,) float32
    returns: ActionColumn = None  # (A,) float32

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        version: int | None = None,
        *,
        by_prompt: bool = False,
        temperature: Callable[[str], float] | None = None,
    ) -> Self:
        """Concatenates trajectories, at least one. `version`: version of the weights that will be trained on
        them, from which `staleness` is computed; None: they are the weights that sampled. `by_prompt`: with
        the column `prompts`. `temperature`: returns that of a source; None: that of the run."""
        counts = [t.num_actions for t in trajectories]
        own = [temperature(t.prompt.source) for t in trajectories] if temperature else []
        return cls(
            token_ids=np.concatenate([t.token_ids for t in trajectories]),
            action_mask=np.concatenate([t.action_mask for t in trajectories]),
            lengths=np.array([len(t.token_ids) for t in trajectories]),
            num_actions=np.array(counts),
            images=images_of(t.images for t in trajectories),
            kept=join_nuclei(trajectories),
            likely=join_likely(trajectories),
            routing=join_routing(trajectories),
            rollout_log_probs=np.concatenate([t.rollout_log_probs for t in trajectories]),
            staleness=None if version is None else _staleness(trajectories, version),
            prompts=_prompts(trajectories) if by_prompt else None,
            temperatures=None if temperature is None else np.repeat(own, counts),
        )

    def __len__(self) -> int:
        """Returns B, the number of sequences."""
        return len(self.lengths)

    def select(self, indices: Sequence[int]) -> Self:
        """Returns the sequences at `indices`, in that order, with every column."""
        of_tokens = _slices(self.lengths, indices)
        of_actions = _slices(self.num_actions, indices)
        columns = {name: _gather(getattr(self, name), of_actions) for name in ACTION_COLUMNS}
        return replace(
            self,
            token_ids=_gather(self.token_ids, of_tokens),
            action_mask=_gather(self.action_mask, of_tokens),
            lengths=self.lengths[list(indices)],
            num_actions=self.num_actions[list(indices)],
            images=tuple(self.images[i] for i in indices) if self.images else (),
            kept=None if self.kept is None else Nuclei.joined(self.kept.parts(of_actions)),
            likely=_gather(self.likely, of_actions),
            routing=_gather(self.routing, of_tokens),
            **columns,
        )

    def put_together(self, parts: Sequence[Sequence[int]], answers: Sequence[np.ndarray]) -> np.ndarray:
        """Scatters results back into this batch's order. `answers[i]`: one value for each action of
        `select(parts[i])`. Returns (A,)."""
        whole = np.empty(int(self.num_actions.sum()), answers[0].dtype)
        for part, answer in zip(parts, answers, strict=True):
            start = 0
            for place in _slices(self.num_actions, part):
                whole[place] = answer[start : (start := start + place.stop - place.start)]
        return whole


# `is`: the type of `routing` equals this one
ACTION_COLUMNS = ("rollout_log_probs", *(f.name for f in fields(Batch) if f.type is ActionColumn))
"""Names of the columns of a batch that have a number for each action."""


def _prompts(trajectories: Sequence[Trajectory]) -> np.ndarray:
    numbers: dict[tuple[int, int], int] = {}
    own = [numbers.setdefault(t.group, len(numbers)) for t in trajectories]
    return np.repeat(own, [t.num_actions for t in trajectories]).astype(np.int32)


def _staleness(trajectories: Sequence[Trajectory], version: int) -> np.ndarray | None:
    """Returns (A,) the number of updates by which the weights that chose each action lag behind `version`.
    None: all are 0."""
    versions, counts = np.concatenate([t.weight_versions for t in trajectories]).T
    return np.repeat(version - versions, counts) if (versions != version).any() else None


def images_of(sequences: Iterable[tuple[Image, ...]]) -> tuple[tuple[Image, ...], ...]:
    """Returns the images of each sequence; an empty tuple if no sequence has any."""
    images = tuple(sequences)
    return images if any(images) else ()


def _slices(sizes: np.ndarray, indices: Sequence[int]) -> list[slice]:
    """Returns the slices that the parts at `indices` occupy in an array of concatenated parts with these
    sizes."""
    chosen = np.asarray(indices, dtype=np.int64)
    ends = sizes.cumsum()[chosen]
    return list(map(slice, (ends - sizes[chosen]).tolist(), ends.tolist()))


def _gather(whole: np.ndarray | None, places: Sequence[slice]) -> np.ndarray | None:
    if whole is None:
        return None
    return np.concatenate([whole[place] for place in places]) if places else whole[:0]


class Updated(NamedTuple):
    """The result of one training update."""

    metrics: Metrics
    """Means of the metrics over the update's optimizer steps."""
    first: list[int]
    """Indices of the sequences of the first optimizer step. Their forward pass comes before any change of the
    policy."""
    log_probs: np.ndarray | None
    """(A,) log-probs of the actions of `first`, in that order, under the policy before the update. None if
    the batch already had them."""


ValueT = TypeVar("ValueT")


def not_none(value: ValueT | None) -> ValueT:
    """Returns an optional value that the caller knows not to be None."""
    assert value is not None
    return value


def as_tensor(array: np.ndarray | None) -> Tensor | None:
    """Returns a tensor that shares the array's memory; None for None."""
    return None if array is None else torch.from_numpy(array)
