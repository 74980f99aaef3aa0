"""Collects the groups of an RL step: filters them, and buffers groups that are sampled ahead for later
steps."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, mean
from typing import Any, Self

from openrlhf.backends.base import Rollout
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.prompt_sampler import PromptDraws, PromptSampler
from openrlhf.errors import ErrorCode, RunError, UsageError
from openrlhf.observability.failures import commonest_failure
from openrlhf.observability.hooks.base import Step
from openrlhf.types import Metrics, Outcome, Prompt, PromptGroup, Purpose, Trajectory, not_none

GroupKey = tuple[int, int]
"""(epoch, prompt id)"""
SAME_REWARD = (
    "they do not distinguish good answers from bad ones, so nothing is learnt. Check the reward function and "
    'the label first: a number never equals a text (7 == "7" is False), --data.label_key may name the wrong '
    "column, or the reward function may not find the answer in the response. Rewards, labels and responses "
    "are in the run folder's rollouts. If the reward is right, all prompts are too easy or too hard."
)
"""Likely causes of rewards that are all equal, and the remedies."""


def group_key(prompt: Prompt) -> GroupKey:
    """Returns the key of the group of a prompt's samples."""
    return prompt.epoch, prompt.prompt_id


class FilterResult(StrEnum):
    """Result of dynamic filtering for a group. Each value is also part of the name of a metric, the fraction
    of such groups in a step."""

    KEPT = "kept"
    LOW = "filtered_low"
    """The mean score is at or below the lower bound of `algo.dynamic_filtering_range`."""
    HIGH = "filtered_high"
    """The mean score is at or above its upper bound."""
    FAILED = "filtered_failed"
    """Every sample of the group failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessLimit:
    """Limits the number of prompts that may be in flight.

    Synchronous training requests prompts only when none is in flight. With `max_staleness` = s > 0, sampling
    continues during training, up to s batches ahead. Groups are trained on in the order in which their
    prompts were requested, so none is older than s steps. If a request may exceed the missing number of
    prompts (`may_exceed`), the surplus is sampled that much earlier.
    """

    batch_size: int
    """Number of groups of one step."""
    chunk: int | None = None
    """Number of prompts per request. None: the missing number."""
    may_exceed: bool = False
    """True if a request may exceed the missing number of prompts."""
    limit: int | None = None
    """Maximum number of prompts that one step requests. None: no limit."""
    max_staleness: int = 0
    """Maximum staleness of a group, in RL steps."""

    @classmethod
    def from_config(cls, config: PPOConfig) -> Self:
        size, chunk = config.rollout.batch_size, config.rollout.vllm_generate_batch_size
        filters = config.algo.dynamic_filtering_enable
        limit = max(config.algo.dynamic_filtering_max_batches * size, chunk or 0)
        return cls(
            batch_size=size,
            chunk=chunk,
            may_exceed=filters or (chunk or 0) > size,
            limit=limit if filters else None,
            max_staleness=config.max_staleness,
        )

    def room(self, *, kept: int, under_way: int, asked: int) -> int:
        """Returns the number of prompts to request now. `kept` groups wait to be trained on, `under_way`
        prompts are being sampled, and this step has already requested `asked` prompts."""
        missing = self.batch_size * (1 + self.max_staleness) - kept - under_way
        if missing <= 0 or (under_way and not self.max_staleness):
            return 0
        size = self.chunk or missing
        if not self.may_exceed:
            size = min(size, missing)
        return size if self.limit is None else min(size, self.limit - asked)


class Collector:
    """Requests samples for prompts and returns groups, `rollout.batch_size` at a time.

    Groups are returned in the order in which their prompts were requested, and each kept group exactly once.
    A batch therefore depends on prompts and scores, not on the order in which samples arrive. With
    `rollout.vllm_generate_batch_size` above the batch size, or with filtering, a step may sample more than it
    needs: the surplus is buffered and used first in the next step.

    Without filtering all prompts of a batch are of one epoch, so that a step trains on the same prompts
    however many are sampled at a time. Filtering (DAPO, https://arxiv.org/abs/2503.14476) fills a batch
    across the boundary of epochs. When no prompt is left, the last batch is smaller.

    With `PromptDraws` a batch has the quotas of the tasks exactly. A curriculum learns of a group when a step
    trains on it or filters it, so that its choices do not depend on the order in which samples arrive.
    """

    def __init__(
        self,
        config: PPOConfig,
        prompts: PromptSampler | PromptDraws,
        rollout: Rollout,
        on_group: Callable[[PromptGroup], None],
    ) -> None:
        """`on_group`: called with each finished group."""
        self._config, self._prompts, self._rollout, self._on_group = config, prompts, rollout, on_group
        self.staleness_limit = StalenessLimit.from_config(config)
        self._draws = prompts if isinstance(prompts, PromptDraws) else None
        self._mixes_epochs = self._filters or self._draws is not None
        self._under_way: dict[GroupKey, Prompt] = {}
        self._finished: dict[GroupKey, PromptGroup] = {}
        self._kept: list[PromptGroup] = []
        self._rejected: list[PromptGroup] = []
        """Groups that the current step has filtered."""
        self._to_submit: list[Prompt] = []
        self._asked = 0
        """Number of prompts that the current step has requested."""
        self._verdicts: Counter[FilterResult] = Counter()
        """Verdicts of the groups that arrived for the current step."""

    @property
    def is_exhausted(self) -> bool:
        """True when no batch is left."""
        return self._prompts.is_exhausted and not self._kept and not self._under_way

    def fill(self, step: Step) -> None:
        """Collects the samples of an RL step, and adds metrics of the collection. A step that stays without
        samples has no prompt left.

        Raises RunError if no group finishes within `rollout.timeout`. With filtering it also raises RunError
        if more samples failed than `reward.max_failed_ratio` allows, if `algo.dynamic_filtering_max_batches`
        batches of prompts are not enough for one batch of groups, or if the first step keeps no group.
        """
        self._asked, self._verdicts, self._rejected = 0, Counter(), []
        if self._to_submit:
            self._rollout.submit(self._to_submit, "train")
            self._to_submit = []
        while self.staleness_limit.max_staleness and self._submit(step):
            pass
        while self._is_incomplete(step):
            self._receive(step)
        batch = self._ready()
        taken = {group_key(group.prompt) for group in batch}
        self._kept = [group for group in self._kept if group_key(group.prompt) not in taken]
        if self._draws:
            self._draws.observe([*batch, *self._rejected])
        if self._filters and step.number == 1 and not batch:
            raise self._filter_error(step)
        step.samples = [t for group in batch for t in group.trajectories]
        step.metrics |= self._metrics(step)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the prompts, the sampled groups that were not trained on yet, and the
        prompts in flight. A resumed run requests the latter again."""
        return {
            "prompts": self._prompts.state_dict(),
            "groups": list(self._kept),
            "under_way": list(self._under_way.values()),
            "finished": list(self._finished.values()),
        }

    def load_state_dict(self, state: dict[str, Any], *, again: bool = False) -> None:
        """Restores a state returned by `state_dict`. Raises UsageError if it is about other prompts, or if it
        holds samples in the format of an older version. `again`: samples all its prompts again."""
        self._prompts.load_state_dict(state["prompts"])
        if state.get("buffer"):
            text = (
                f"the checkpoint holds {len(state['buffer'])} groups of samples in the format of an older "
                "version.\nResume with that version, or start a new run."
            )
            raise UsageError(ErrorCode.OTHER_RUN, text, flag="--ckpt.load_enable")
        self._kept = list(state.get("groups", ()))
        self._under_way = {group_key(prompt): prompt for prompt in state.get("under_way", ())}
        self._finished = {group_key(group.prompt): group for group in state.get("finished", ())}
        if again:
            self._under_way = {group_key(g.prompt): g.prompt for g in self._kept} | self._under_way
            self._kept, self._finished = [], {}
        self._to_submit = [p for key, p in self._under_way.items() if key not in self._finished]

    @property
    def _filters(self) -> bool:
        return self._config.algo.dynamic_filtering_enable

    def _is_incomplete(self, step: Step) -> bool:
        """Returns True while the step needs another group."""
        if self._under_way and not self.staleness_limit.max_staleness:
            return True  # samples in flight must finish before the weights change
        if len(self._ready()) == self._config.rollout.batch_size:
            return False
        if self._is_end_of_episode:
            return False
        return self._submit(step) or bool(self._under_way)

    def _ready(self) -> list[PromptGroup]:
        """Returns the groups that are ready for the next batch. Without filtering or draws they are all of
        one epoch."""
        if self._draws:
            return self._draws.of_step(self._kept)
        ready = [g for g in self._kept if self._filters or g.prompt.epoch == self._epoch]
        return ready[: self._config.rollout.batch_size]

    @property
    def _epoch(self) -> int:
        """The first epoch with groups that were not trained on yet."""
        waiting = (group.prompt.epoch for group in self._kept)
        return min([*waiting, *(epoch for epoch, _ in self._under_way)], default=self._prompts.epoch)

    @property
    def _is_end_of_episode(self) -> bool:
        """True if the next batch remains incomplete, because its epoch has no further prompts."""
        if self._mixes_epochs or not self._kept:
            return False
        is_sampled = any(epoch == self._epoch for epoch, _ in self._under_way)
        return not is_sampled and self._prompts.epoch != self._epoch

    def _submit(self, step: Step) -> bool:
        """Requests as many prompts as `staleness_limit` allows. Returns True if it requested any."""
        prompts = self._next_prompts(step)
        if prompts:
            self._rollout.submit(prompts, "train")
            self._under_way |= {group_key(prompt): prompt for prompt in prompts}
            self._asked += len(prompts)
        return bool(prompts)

    def _next_prompts(self, step: Step) -> list[Prompt]:
        """Returns the next prompts to sample. Empty if no group is missing, or if the batch remains
        incomplete."""
        kept, under_way = len(self._kept) + self._unfillable_places, len(self._under_way)
        held = Counter[str]()
        if self._draws:  # the surplus of a task takes no places of the others
            held.update(map(self._draws.task, (*(g.prompt for g in self._kept), *self._under_way.values())))
            most = {
                task: n * (1 + self.staleness_limit.max_staleness) for task, n in self._draws.quotas.items()
            }
            kept = (held & Counter(most)).total() - under_way
        room = self.staleness_limit.room(kept=kept, under_way=under_way, asked=self._asked)
        if room <= 0:
            is_short = len(self._ready()) < self._config.rollout.batch_size and not self._is_end_of_episode
            if is_short and not under_way and not self._prompts.is_exhausted:
                raise self._filter_error(step)
            return []
        if isinstance(self._prompts, PromptDraws):
            return self._prompts.next_batch(room, held)
        return self._prompts.next_batch(room)

    @property
    def _unfillable_places(self) -> int:
        """Number of places in incomplete last batches of epochs, which prompts of the next epoch must not
        fill. Counting them as taken keeps later groups within the staleness bound."""
        if self._mixes_epochs or not self.staleness_limit.max_staleness:
            return 0
        waiting = Counter([*(g.prompt.epoch for g in self._kept), *(e for e, _ in self._under_way)])
        del waiting[self._prompts.epoch]
        return sum(-count % self._config.rollout.batch_size for count in waiting.values())

    def _receive(self, step: Step) -> None:
        """Waits for one group. Then applies the filter, in the order of requests, to each finished group
        before which no other is unfinished."""
        group = self._rollout.next_group("train", self._config.rollout.timeout)
        self._on_group(group)
        self._finished[group_key(group.prompt)] = group
        while (first := next(iter(self._under_way), None)) in self._finished:
            del self._under_way[first]
            self._decide(self._finished.pop(first), step)
        if self._filters and not self._under_way:
            self._check_failures(step)

    def _decide(self, group: PromptGroup, step: Step) -> None:
        filter_result = self._filter(group)
        self._verdicts[filter_result] += 1
        step.collected += group.trajectories
        if filter_result is FilterResult.KEPT:
            self._kept.append(group)
        else:
            self._rejected.append(group)
            step.filtered += group.trajectories

    def _check_failures(self, step: Step) -> None:
        if self._verdicts.total() >= self._config.rollout.batch_size:
            check_failures(step.collected, self._config.reward.max_failed_ratio, step.number)
        elif self._prompts.is_exhausted:
            # less than a batch is no estimate of the failure rate
            check_failures(step.collected, 1.0, step.number)

    def _filter(self, group: PromptGroup) -> FilterResult:
        """Applies the filter. `statistics.mean` is exact up to one rounding, so the mean of equal
        scores equals each of them."""
        if not self._filters:
            return FilterResult.KEPT
        scores = [not_none(t.score) for t in group.trajectories if t.ok and t.is_first]
        if not scores:
            return FilterResult.FAILED
        low, high = self._config.algo.dynamic_filtering_range
        score = mean(scores)
        if low < score < high:
            return FilterResult.KEPT
        return FilterResult.LOW if score <= low else FilterResult.HIGH

    def _metrics(self, step: Step) -> Metrics:
        num_prompts = self._verdicts.total()
        metrics = {"rollout/num_prompts": float(num_prompts)}
        if self.staleness_limit.may_exceed:
            metrics["rollout/buffered_groups"] = float(len(self._kept))
        if self._filters and num_prompts:
            metrics |= {
                f"rollout/{filter_result}_ratio": self._verdicts[filter_result] / num_prompts
                for filter_result in FilterResult
            }
            if scores := [not_none(t.score) for t in step.collected if t.ok and t.is_first]:
                metrics["rollout/sampled_score_mean"] = fmean(scores)
        return metrics

    def _filter_error(self, step: Step) -> RunError:
        algo, size = self._config.algo, self._config.rollout.batch_size
        (low, high), results = algo.dynamic_filtering_range, self._verdicts
        remedy = (
            "Use prompts that the policy solves in some samples and not in others, or widen "
            "--algo.dynamic_filtering_range."
        )
        scores = {not_none(t.score) for t in step.collected if t.ok}
        if len(scores) == 1:
            remedy = f"All scores are {scores.pop():g}: {SAME_REWARD}"
        text = (
            f"step {step.number}: dynamic filtering kept {results[FilterResult.KEPT]} of {results.total()} "
            f"groups, and the step needs {size}. Groups with a mean score of {low:g} or less: "
            f"{results[FilterResult.LOW]}; of {high:g} or more: {results[FilterResult.HIGH]}; without a "
            f"finished sample: {results[FilterResult.FAILED]}.\n{remedy}\n"
            "If successes are rare, raise --algo.dynamic_filtering_max_batches "
            f"{algo.dynamic_filtering_max_batches}: a step samples at most that many batches of prompts."
        )
        return RunError(ErrorCode.EPISODES_FAILED, text)


def check_collected(config: PPOConfig, step: Step) -> None:
    """Raises RunError for an outcome of `rollout.stop_on`, and if too many samples failed."""
    check_stops(step.collected, config.rollout.stop_on or (), step.number)
    if num_samples(step.collected) >= config.samples_per_step:  # few are no estimate of the failure rate
        check_failures(step.collected, config.reward.max_failed_ratio, step.number)
    check_failures(step.samples, 1.0, step.number)


def num_samples(samples: Sequence[Trajectory]) -> int:
    """Returns the number of episodes. An episode with several sequences counts once."""
    return sum(t.is_first for t in samples)


def check_stops(samples: Sequence[Trajectory], stop_on: Collection[str], step: int) -> None:
    """Raises RunError if a sample failed with an outcome of `stop_on`."""
    if failed := next((t for t in samples if t.outcome in stop_on), None):
        text = f"step {step}: a sample ended with this outcome:\n{failed.error}"
        raise RunError(_choose_code(failed), text, flag="--rollout.stop_on", value=failed.outcome)


def sample_all(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    purpose: Purpose,
    timeout: float | None,
    on_group: Callable[[PromptGroup], None] = lambda group: None,
) -> list[PromptGroup]:
    """Samples prompts, which differ in epoch or number. Returns the groups in the order of `prompts`.
    `timeout`: maximum seconds between two groups; `on_group` gets each group when it has finished."""
    rollout.submit(prompts, purpose)
    asked, groups = {*map(group_key, prompts)}, dict[GroupKey, PromptGroup]()
    while len(groups) < len(asked):
        group = rollout.next_group(purpose, timeout)
        if (key := group_key(group.prompt)) in asked:  # else a call that timed out has left it
            groups[key] = group
            on_group(group)
    return [groups[group_key(prompt)] for prompt in prompts]


def check_failures(samples: Sequence[Trajectory], max_failed_ratio: float, step: int) -> None:
    """Raises RunError if all samples failed, or more than the fraction `max_failed_ratio` of them."""
    samples = [t for t in samples if t.is_first]
    failed = [t for t in samples if not t.ok]
    if failed and (len(failed) > max_failed_ratio * len(samples) or len(failed) == len(samples)):
        example, count = commonest_failure(failed)
        rest = ", so none is left to train on" if len(failed) == len(samples) else ""
        raise RunError(
            _choose_code(example),
            f"step {step}: {len(failed)} of {len(samples)} samples failed{rest}. {count} of them with:\n"
            f"{example.error}",
            flag="--reward.max_failed_ratio",
            value=f"{max_failed_ratio:g}",
        )


def _choose_code(failed: Trajectory) -> ErrorCode:
    is_reward = failed.outcome is Outcome.REWARD_ERROR
    return ErrorCode.REWARDS_FAILED if is_reward else ErrorCode.EPISODES_FAILED
