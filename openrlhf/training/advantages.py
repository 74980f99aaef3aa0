"""Advantages and returns of a step's actions."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.advantages.groups import group_std, is_singleton
from openrlhf.algorithms.advantages.returns import explained_variance, token_rewards
from openrlhf.algorithms.kl import approx_kl
from openrlhf.algorithms.mismatch import mismatch_metrics
from openrlhf.algorithms.reductions import BLOCK, blockwise, mean, segment_sum, whiten
from openrlhf.algorithms.rewards import clip, overlong_penalty, stop_properly_penalty
from openrlhf.config.ppo import PENALTIES, AlgoConfig, PPOConfig, RewardConfig
from openrlhf.types import Batch, Metrics, Trajectory, as_tensor


@torch.no_grad()
def compute_advantages(
    batch: Batch,
    samples: Sequence[Trajectory],
    *,
    estimator: AdvantageEstimator,
    algo: AlgoConfig,
    reward: RewardConfig,
    kl_coef: float,
    max_new_tokens: int,
    teacher_coef: float = 0.0,
    tasks: Mapping[str, Mapping[str, Any]] = {},
) -> tuple[Batch, Metrics]:
    """Returns the batch with the advantages and returns of its actions, and metrics. `batch` and
    `samples` describe the same sequences: all successful samples of the step, at least one. Failed samples
    are missing, so groups differ in size; estimators that compare samples give the sample of a
    singleton group an advantage of 0.

    length penalties -> estimator.shape -> clipping -> KL penalty and teacher reward of each action ->
    estimator.advantages -> whitening over all actions

    If rewards of turns are known and the estimator discounts, each turn's reward is placed at the turn's last
    action, and what remains of the episode's reward at the last action of a sequence.

    `kl_coef`: the KL controller's coefficient. `max_new_tokens`: the length limit of the overlong penalty.
    `teacher_coef`: the weight of the reward log p_teacher - log p of each action, with a teacher. This reward
    is minus a one-sample estimate of KL(policy || teacher): on-policy distillation,
    https://arxiv.org/abs/2306.13649. `tasks`: values of `TaskConfig` by key and source.
    """
    step = step_view(batch, samples, algo=algo, reward=reward, max_new_tokens=max_new_tokens, tasks=tasks)
    counts, log_probs, ref_log_probs = step.counts, step.log_probs, step.ref_log_probs
    shaped = estimator.shape(step).to(step.rewards.dtype)
    for source, name in tasks.get("estimator", {}).items():
        sources = {t.sample: t.prompt.source for t in samples}.values()
        is_own = torch.tensor([source == other for other in sources])
        shaped = ESTIMATORS[name]().shape(step).where(is_own, shaped)
    in_range = clip(shaped, *reward.clip_range)
    clipped = in_range[step.episodes]
    kl = _difference(log_probs, ref_log_probs, partial(approx_kl, estimator=algo.kl.estimator))
    to_teacher = _difference(log_probs, as_tensor(batch.teacher_log_probs), torch.sub)
    of_turns = rewards_of_earlier_turns(samples) if estimator.discounts else None
    if of_turns is not None:
        clipped = clipped - of_turns[1]
    coef: float | Tensor = 0.0 if algo.kl.use_loss else kl_coef
    if own := tasks.get("kl_coef"):
        coef = torch.tensor([own.get(t.prompt.source, kl_coef) for t in samples]).repeat_interleave(counts)
    penalised = torch.zeros(int(counts.sum())) if kl is None else kl
    per_action = token_rewards(clipped, penalised, counts, coef)
    if of_turns is not None:
        per_action = per_action + of_turns[0]
    if to_teacher is not None:
        per_action = per_action - teacher_coef * to_teacher
    advantages, returns = (x.to(per_action.dtype) for x in estimator.advantages(per_action, step))
    if estimator.whiten:
        advantages = whiten(advantages, scale=not algo.advantage.no_std_norm)

    batch = replace(batch, advantages=advantages.numpy(), returns=returns.numpy())
    metrics: Metrics = {}
    if step.values is not None:
        metrics["critic/explained_variance"] = explained_variance(step.values, returns)
    center = mean(advantages)
    metrics |= _reward_metrics(step.rewards, step.group_ids) | {
        "reward/clipped_fraction": float((in_range != shaped).double().mean()),
        "reward/shaped_min": float(shaped.min()),
        "reward/shaped_max": float(shaped.max()),
        "reward/return_mean": _total(per_action) / len(counts),
        "advantage/mean": _total(advantages) / max(1, len(advantages)),
        "advantage/abs_mean": float(mean(advantages.abs())),
        "advantage/std": float(mean(blockwise(lambda a: (a - center) ** 2, advantages)).sqrt()),
        "kl/coef": kl_coef,
    }
    if to_teacher is not None:
        metrics["teacher/kl_mean"] = float(mean(to_teacher))
    if batch.log_probs is not None:
        metrics |= log_prob_metrics(batch, algo.kl.estimator, kl)
    return batch, metrics


def advantage_arguments(config: PPOConfig, kl_coef: float) -> dict[str, Any]:
    """Returns the arguments of `compute_advantages`, except for samples and estimator."""
    return {
        "algo": config.algo,
        "reward": config.reward,
        "kl_coef": kl_coef,
        "max_new_tokens": config.longest_response,
        "teacher_coef": config.teacher.kd_coef,
        "tasks": {key: own for key in SHAPING if (own := config.task_values(key))},
    }


SHAPING = ("estimator", "kl_coef", *PENALTIES)
"""Keys of a task that decide how its rewards become advantages."""


def rewards_of_earlier_turns(samples: Sequence[Trajectory]) -> tuple[Tensor, Tensor] | None:
    """Returns (A,) the reward of each turn, except a sequence's last turn, at the turn's last action, 0 at
    all other actions; and (B,) the sum of the episode's rewards before a sequence's last turn, also in
    earlier sequences. None if no trajectory has rewards of turns."""
    if not any(len(t.turn_rewards) for t in samples):
        return None
    rows, sums, of_episodes = [], [], defaultdict[tuple, float](float)
    for t in samples:
        rows.append(row := torch.zeros(t.num_actions))
        # number of actions before each turn, except the first
        before = t.action_mask.cumsum()[t.turn_starts[1:] - 1]
        row[before - 1] = torch.from_numpy(t.turn_rewards[:-1].copy()) if len(t.turn_rewards) else 0.0
        sums.append(of_episodes[t.sample] + float(row.sum()))
        of_episodes[t.sample] += float(t.turn_rewards.sum())
    return torch.cat(rows), torch.tensor(sums)


def log_prob_metrics(batch: Batch, estimator: str, kl: Tensor | None = None) -> Metrics:
    """Returns metrics of the mismatch between policy and sampler and, with a reference, of the KL to the
    reference. `kl/mean` is the input of the KL controller. The batch must have the policy's log-probs before
    the update. `kl`: their KL estimates (A,), if known."""
    assert batch.log_probs is not None
    log_probs = torch.from_numpy(batch.log_probs)
    rollout_log_probs, staleness = torch.from_numpy(batch.rollout_log_probs), as_tensor(batch.staleness)
    counts = torch.from_numpy(batch.num_actions)
    sampled, own = ~rollout_log_probs.isnan(), log_probs
    if not sampled.all():  # some are answers of `Run.given`
        own, rollout_log_probs = log_probs[sampled], rollout_log_probs[sampled]
        staleness = None if staleness is None else staleness[sampled]
        counts = segment_sum(sampled.long(), counts)
    metrics = mismatch_metrics(own, rollout_log_probs, staleness, counts) if len(own) else {}
    if batch.ref_log_probs is not None:
        ref_log_probs = torch.from_numpy(batch.ref_log_probs)
        if kl is None:
            kl = blockwise(partial(approx_kl, estimator=estimator), log_probs, ref_log_probs)
        metrics["kl/mean"] = float(mean(kl))
        metrics["kl/log_ratio_mean"] = float(mean(log_probs - ref_log_probs))
    return metrics


def step_view(
    batch: Batch,
    samples: Sequence[Trajectory],
    *,
    algo: AlgoConfig,
    reward: RewardConfig,
    max_new_tokens: int,
    tasks: Mapping[str, Mapping[str, Any]] = {},
) -> StepView:
    """Returns the samples as an estimator sees them. It groups sequences into episodes, each of which has one
    reward."""
    numbers: dict[tuple, int] = {}
    keys = [t.sample for t in samples]
    parts = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
    last = list(dict(zip(keys, samples, strict=True)).values())
    groups: dict[tuple[int, int], int] = {}
    counts = torch.from_numpy(batch.num_actions)
    turns = torch.tensor([max(1, len(t.turn_starts)) for t in samples])
    lengths = counts.new_zeros(len(last)).index_add(0, parts, counts)
    truncated = torch.tensor([t.truncated for t in last])
    names = {name for t in last for name in t.extra_logs} | {"score"}
    values_of = [t.extra_logs | {"score": nan if t.score is None else t.score} for t in last]
    rewards = torch.tensor([t.reward for t in last], dtype=torch.float32)  # finished samples have one
    penalised = partial(_penalised, rewards, lengths, truncated, max_new_tokens=max_new_tokens)
    rewards = penalised(reward)
    for source in {source for key in PENALTIES for source in tasks.get(key, ())}:
        own = {key: tasks[key][source] for key in PENALTIES if source in tasks.get(key, ())}
        is_own = torch.tensor([t.prompt.source == source for t in last])
        rewards = torch.where(is_own, penalised(replace(reward, **own)), rewards)
    return StepView(
        rewards=rewards,
        group_ids=torch.tensor([groups.setdefault(t.group, len(groups)) for t in last]),
        named_rewards={
            name: torch.tensor([values.get(name, nan) for values in values_of]) for name in sorted(names)
        },
        lengths=lengths,
        turns=turns.new_zeros(len(last)).index_add(0, parts, turns),
        truncated=truncated,
        episodes=parts,
        counts=counts,
        log_probs=as_tensor(batch.log_probs),
        rollout_log_probs=torch.from_numpy(batch.rollout_log_probs),
        ref_log_probs=as_tensor(batch.ref_log_probs),
        values=as_tensor(batch.values),
        gamma=algo.advantage.gamma,
        lambd=algo.advantage.lambd,
    )


def _penalised(
    rewards: Tensor, lengths: Tensor, truncated: Tensor, reward: RewardConfig, *, max_new_tokens: int
) -> Tensor:
    """Applies the length penalties of `reward` to the rewards (E,) of episodes. Returns (E,)."""
    if reward.overlong_buffer_len is not None:
        rewards = overlong_penalty(
            rewards,
            lengths,
            max_new_tokens=max_new_tokens,
            buffer_len=reward.overlong_buffer_len,
            factor=reward.overlong_penalty_factor,
        )
    if reward.stop_properly_penalty_coef is not None:
        rewards = stop_properly_penalty(rewards, truncated, coef=reward.stop_properly_penalty_coef)
    return rewards


def _total(values: Tensor) -> float:
    """Returns the sum, rounded to 0 if it is within float32 rounding error of 0: less than a millionth of the
    sum of absolute values."""
    total = float(values.double().sum())
    largest = sum(float(part.double().abs().sum()) for part in values.split(BLOCK))
    return total if abs(total) > 16 * 2**-24 * largest else 0.0


def _difference(
    log_probs: Tensor | None, others: Tensor | None, measure: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    """Returns `measure` of both log-probs, (A,); None if one of them is None."""
    return None if log_probs is None or others is None else blockwise(measure, log_probs, others)


def _reward_metrics(rewards: Tensor, group_ids: Tensor) -> Metrics:
    """Returns metrics of the penalised rewards (E,). Those of the spread within groups are omitted if all
    groups are singletons."""
    alone = is_singleton(group_ids)
    metrics = {"reward/mean": float(rewards.mean()), "reward/without_peers": float(alone.sum())}
    if not alone.all():
        spread = group_std(rewards, group_ids)[~alone]
        metrics["reward/group_std"] = float(spread.mean())
        metrics["reward/zero_std_fraction"] = float((spread == 0).double().mean())
    return metrics
