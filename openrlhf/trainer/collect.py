"""Which trajectories the next RL step trains on: as many groups as it wants, filtered, with what was sampled
ahead kept for later."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, mean
from typing import Any

from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.sampler import PromptSampler
from openrlhf.observe.failures import commonest_failure
from openrlhf.types import Metrics, Prompt, Trajectory, present

Group = list[Trajectory]
"""The samples of one prompt."""


class Verdict(StrEnum):
    """What dynamic filtering says of a group. The shares of a step's groups are metrics of these names."""

    KEPT = "kept"
    LOW = "filtered_low"
    HIGH = "filtered_high"
    FAILED = "filtered_failed"
    """No sample of the group finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    trajectories: list[Trajectory]
    """The groups to train on, one after the other. Empty when no prompt is left."""
    sampled: list[Trajectory]
    """What was sampled in this step: also what was filtered out, or is kept for a later step."""
    filtered: list[Trajectory]
    """What was filtered out."""
    metrics: Metrics


class Collector:
    """Takes prompts, has them sampled and hands out groups, `rollout.batch_size` at a time.

    Groups are handed out in the order in which their prompts were asked for, each that is kept exactly once.
    So a batch depends on prompts and scores, and not on the order in which samples arrive. With
    `rollout.vllm_generate_batch_size` above the batch size, or with filtering, more may be sampled than a
    step needs: the surplus waits in a buffer, and comes first in the next step.

    Without filtering a batch holds prompts of one episode, so that a step trains on the same prompts however
    many are sampled at a time. Filtering (DAPO, https://arxiv.org/abs/2503.14476) fills a batch across the
    border of episodes. When no prompt is left, the last batch is what there is.
    """

    def __init__(
        self,
        config: PPOConfig,
        prompts: PromptSampler,
        generate: Callable[[Sequence[Prompt]], Sequence[Trajectory]],
    ) -> None:
        """`generate` samples prompts: every trajectory of each, in any order."""
        self._config, self._prompts, self._generate = config, prompts, generate
        self._buffer: list[Group] = []

    @property
    def is_exhausted(self) -> bool:
        """There is no batch after the last one."""
        return self._prompts.is_exhausted and not self._buffer

    def next_batch(self, step: int) -> Collected:
        """The trajectories of RL step `step`, which error messages name.

        RuntimeError, where filtering is on: more of the samples failed than `reward.max_failed_ratio` allows,
        `algo.dynamic_filtering_max_batches` batches of prompts did not give one, or the first step has
        nothing at all.
        """
        size = self._config.rollout.batch_size
        sampled: list[Trajectory] = []
        filtered: list[Trajectory] = []
        verdicts = Counter[Verdict]()
        while len(self._buffer) < size and (prompts := self._next_prompts(step, verdicts)):
            for group in group_by_prompt(prompts, self._generate(prompts)):
                verdict = self._judge(group)
                verdicts[verdict] += 1
                sampled += group
                if verdict is Verdict.KEPT:
                    self._buffer.append(group)
                else:
                    filtered += group
            if self._filters and verdicts.total() >= size:
                check_failures(sampled, self._config.reward.max_failed_ratio, step)
            elif self._filters and self._prompts.is_exhausted:
                check_failures(sampled, 1.0, step)  # of fewer prompts than a batch a ratio says little
        batch, self._buffer = self._buffer[:size], self._buffer[size:]
        if self._filters and step == 1 and not batch:
            raise RuntimeError(self._kept_too_little(step, verdicts))
        return Collected(
            trajectories=[t for group in batch for t in group],
            sampled=sampled,
            filtered=filtered,
            metrics=self._metrics(sampled, verdicts),
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the prompts stand, and the groups that were sampled and not yet trained on."""
        return {"prompts": self._prompts.state_dict(), "buffer": list(self._buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the collector that wrote `state` would have. ValueError when it read other prompts."""
        self._prompts.load_state_dict(state["prompts"])
        self._buffer = list(state["buffer"])

    @property
    def _filters(self) -> bool:
        return self._config.algo.dynamic_filtering_enable

    @property
    def _runs_ahead(self) -> bool:
        """More may be sampled than a step needs."""
        rollout = self._config.rollout
        return self._filters or (rollout.vllm_generate_batch_size or 0) > rollout.batch_size

    def _next_prompts(self, step: int, verdicts: Counter[Verdict]) -> list[Prompt]:
        """What to sample next, while the buffer holds too little. Empty: the batch is what there is."""
        rollout = self._config.rollout
        missing = rollout.batch_size - len(self._buffer)
        size = rollout.vllm_generate_batch_size or missing
        if not self._runs_ahead:
            size = min(size, missing)
        if self._filters:
            at_most = self._config.algo.dynamic_filtering_max_batches * rollout.batch_size
            left = max(at_most, rollout.vllm_generate_batch_size or 0) - verdicts.total()
            if left == 0 and not self._prompts.is_exhausted:
                raise RuntimeError(self._kept_too_little(step, verdicts))
            return self._prompts.next_batch(min(size, left))
        is_episode_over = self._buffer and self._buffer[-1][0].prompt.episode != self._prompts.episode
        return [] if is_episode_over else self._prompts.next_batch(size)

    def _judge(self, group: Group) -> Verdict:
        """The mean is exact before it is rounded once: equal scores at a bound are at the bound."""
        if not self._filters:
            return Verdict.KEPT
        scores = [present(t.score) for t in group if t.ok]
        if not scores:
            return Verdict.FAILED
        low, high = self._config.algo.dynamic_filtering_range
        score = mean(scores)
        if low < score < high:
            return Verdict.KEPT
        return Verdict.LOW if score <= low else Verdict.HIGH

    def _metrics(self, sampled: Sequence[Trajectory], verdicts: Counter[Verdict]) -> Metrics:
        num_prompts = verdicts.total()
        metrics = {"rollout/num_prompts": float(num_prompts)}
        if self._runs_ahead:
            metrics["rollout/buffered_groups"] = float(len(self._buffer))
        if self._filters and num_prompts:
            metrics |= {f"rollout/{verdict}_ratio": verdicts[verdict] / num_prompts for verdict in Verdict}
            if scores := [present(t.score) for t in sampled if t.ok]:
                metrics["rollout/sampled_score_mean"] = fmean(scores)
        return metrics

    def _kept_too_little(self, step: int, verdicts: Counter[Verdict]) -> str:
        algo, size = self._config.algo, self._config.rollout.batch_size
        low, high = algo.dynamic_filtering_range
        return (
            f"step {step}: dynamic filtering kept {verdicts[Verdict.KEPT]} of the {verdicts.total()} groups "
            f"asked for, and the step needs {size}. Mean score {low:g} or less: {verdicts[Verdict.LOW]}; "
            f"{high:g} or more: {verdicts[Verdict.HIGH]}; no finished sample: {verdicts[Verdict.FAILED]}.\n"
            "Use prompts that the policy solves sometimes, not always, or widen "
            "--algo.dynamic_filtering_range.\n"
            f"A step asks for --algo.dynamic_filtering_max_batches {algo.dynamic_filtering_max_batches} "
            "batches of prompts at most; raise it for rare successes."
        )


def group_by_prompt(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Group]:
    """The samples of each prompt, ordered as the prompts are and by their index, however they came."""
    groups: dict[tuple[int, int], Group] = {(p.episode, p.prompt_id): [] for p in prompts}
    for t in sorted(trajectories, key=lambda t: t.sample_index):
        groups[t.prompt.episode, t.prompt.prompt_id].append(t)
    return list(groups.values())


def check_failures(trajectories: Sequence[Trajectory], max_failed_ratio: float, step: int) -> None:
    """RuntimeError where more of them failed than the ratio allows, or all."""
    failed = [t for t in trajectories if not t.ok]
    if failed and (len(failed) > max_failed_ratio * len(trajectories) or len(failed) == len(trajectories)):
        example, count = commonest_failure(failed)
        allowed = f", more than --reward.max_failed_ratio {max_failed_ratio:g} allows"
        if len(failed) <= max_failed_ratio * len(trajectories):
            allowed = f"; --reward.max_failed_ratio {max_failed_ratio:g} allows that, but nothing is left"
        raise RuntimeError(
            f"step {step}: {len(failed)} of {len(trajectories)} samples failed{allowed}. "
            f"{count} of them with:\n{example.error}"
        )
