"""Advantages and returns of RL, one episode and one sequence at a time in float64."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch

from openrlhf.api import AlgoConfig, Batch, RewardConfig, Trajectory, not_none
from openrlhf.tools.reference.policy import plain_kl

ROUNDINGS = 256
"""Allowed error of advantages as a multiple of one rounding error of the largest reward or return.
Independent errors grow with the square root of their number: 256 for 65,536 actions."""
NOISE = 1e-2
"""Relative spread of the rewards of a group up to which GRPO's division by it magnifies the rounding of
length penalties too much for a comparison."""


class PlainAdvantages(NamedTuple):
    values: np.ndarray
    """(A,) advantages of the batch's actions, float64."""
    returns: np.ndarray
    """(A,) their returns, float64: the critic's targets."""
    rounding: float
    """Largest error of the advantages' computation in float32."""
    rounding_of_returns: float


def plain_advantages(
    batch: Batch,
    trajectories: Sequence[Trajectory],
    *,
    algo: AlgoConfig,
    reward: RewardConfig,
    kl_coef: float,
    max_new_tokens: int,
    teacher_coef: float = 0.0,
    tasks: Mapping[str, Mapping[str, Any]] = {},
) -> PlainAdvantages | None:
    """Returns the advantages of a batch; see `advantages.compute_advantages` for the arguments. None for what
    these formulas do not cover: estimators of the user, and groups of GRPO whose rewards differ little after
    length penalties."""
    name, gamma, lambd = algo.advantage.estimator, algo.advantage.gamma, algo.advantage.lambd
    if name not in BASELINES:
        return None
    own = {t.prompt.source: _of_task(t.prompt.source, reward, tasks) for t in trajectories}
    names = {t.group: tasks.get("estimator", {}).get(t.prompt.source, name) for t in trajectories}
    ends = np.cumsum(batch.num_actions)
    parts = [slice(end - n, end) for end, n in zip(ends, batch.num_actions, strict=True)]
    groups = _rewards(batch, trajectories, own, max_new_tokens)
    if name == "flash_reinforce":  # its baseline is that of the whole step
        groups = {(0, 0): {sample: r for rewards in groups.values() for sample, r in rewards.items()}}
        names = {(0, 0): name}
    has_penalties = any(
        r.overlong_buffer_len is not None or r.stop_properly_penalty_coef is not None for r in own.values()
    )
    normed = [rewards for group, rewards in groups.items() if names[group] == "group_norm"]
    if has_penalties and any(map(_is_noise, normed)):
        return None
    shaped = _shaped(groups, names, reward)
    found, returns = np.zeros((2, len(batch.rollout_log_probs)))
    spent = defaultdict[tuple, float](float)  # the rewards of an episode's turns in earlier sequences
    for t, part in zip(trajectories, parts, strict=True):
        if part.start == part.stop:
            continue
        rewards = np.zeros(part.stop - part.start)
        if batch.log_probs is not None and batch.ref_log_probs is not None and not algo.kl.use_loss:
            log_ratio = batch.log_probs[part].astype(np.float64) - batch.ref_log_probs[part]
            coef = tasks.get("kl_coef", {}).get(t.prompt.source, kl_coef)
            rewards -= coef * plain_kl(torch.from_numpy(log_ratio), algo.kl.estimator).numpy()
        if batch.log_probs is not None and batch.teacher_log_probs is not None:
            log_ratio = batch.log_probs[part].astype(np.float64) - batch.teacher_log_probs[part]
            rewards -= teacher_coef * log_ratio
        rewards[-1] += shaped[t.sample]
        if name in DISCOUNTED and len(t.turn_rewards):
            ends_of_turns = t.action_mask.cumsum()[t.turn_starts[1:] - 1] - 1
            earlier = t.turn_rewards[:-1].astype(np.float64)
            rewards[ends_of_turns] += earlier
            rewards[-1] -= earlier.sum() + spent[t.sample]
            spent[t.sample] += float(t.turn_rewards.sum(dtype=np.float64))
        if name == "gae":
            values = not_none(batch.values)[part].astype(np.float64)
            rewards += gamma * np.append(values[1:], 0.0) - values
            found[part] = _discounted(rewards, gamma * lambd)
            returns[part] = found[part] + values
        else:
            found[part] = returns[part] = _discounted(rewards, gamma if name in DISCOUNTED else 1.0)
    largest = max(abs(r) for rewards in groups.values() for r in rewards.values())
    largest, scale = max(1.0, largest, float(np.abs(found).max(initial=0.0))), 1.0
    if name in WHITENED and len(found):
        found = found - found.mean()
        if not algo.advantage.no_std_norm:
            scale = float(np.sqrt(max(found.var(), 1e-8)))
    rounding = ROUNDINGS * 2.0**-24 * largest
    return PlainAdvantages(found / scale, returns, rounding / scale, rounding)


def _centered(rewards: Sequence[float]) -> list[float]:
    return [r - fmean(rewards) for r in rewards]


BASELINES: Mapping[str, Callable[[Sequence[float]], Sequence[float]] | None] = {
    "gae": None,
    "reinforce": None,
    "reinforce_baseline": _centered,
    "group_norm": lambda rewards: [r / (stdev(rewards) + 1e-9) for r in _centered(rewards)],
    "dr_grpo": _centered,
    "flash_reinforce": _centered,
    "rloo": lambda rewards: [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards],
}
"""Estimator -> function of the rewards of a group of at least two samples; None: rewards are not compared."""
WHITENED = ("gae", "reinforce", "reinforce_baseline")
DISCOUNTED = ("gae", "reinforce")
"""Estimators that discount, and that use the rewards of turns."""


def _of_task(source: str, reward: RewardConfig, tasks: Mapping[str, Mapping[str, Any]]) -> RewardConfig:
    """Returns the penalties of a source: the run's, with the values of its task."""
    values = {key: of[source] for key, of in tasks.items() if hasattr(reward, key) and source in of}
    return replace(reward, **values)


def _is_noise(rewards: Mapping[tuple, float]) -> bool:
    low, high = min(rewards.values()), max(rewards.values())
    return low < high and high - low < NOISE * max(abs(low), abs(high))


def _rewards(
    batch: Batch, trajectories: Sequence[Trajectory], own: Mapping[str, RewardConfig], max_new_tokens: int
) -> dict[tuple[int, int], dict[tuple, float]]:
    """Returns group -> episode -> its reward after the length penalties of its source, `own`."""
    episodes: dict[tuple, tuple[Trajectory, int]] = {}
    for t, num_actions in zip(trajectories, batch.num_actions.tolist(), strict=True):
        episodes[t.sample] = t, num_actions + (episodes[t.sample][1] if t.sample in episodes else 0)
    groups: dict[tuple[int, int], dict[tuple, float]] = {}
    for sample, (t, length) in episodes.items():
        value, reward = float(np.float32(not_none(t.reward))), own[t.prompt.source]
        if (buffer := reward.overlong_buffer_len) is not None:
            excess = min(max(length - (max_new_tokens - buffer), 0), buffer)
            value -= excess / buffer * reward.overlong_penalty_factor
        if (coef := reward.stop_properly_penalty_coef) is not None and t.truncated:
            value = value * coef if coef >= 0 else coef
        groups.setdefault(t.group, {})[sample] = value
    return groups


def _shaped(
    groups: Mapping[tuple[int, int], Mapping[tuple, float]],
    names: Mapping[tuple[int, int], str],
    reward: RewardConfig,
) -> dict[tuple, float]:
    """Returns the reward of each episode minus the baseline of its group's estimator, `names`, clipped."""
    found: dict[tuple, float] = {}
    for group, rewards in groups.items():
        shaped: Sequence[float] = list(rewards.values())
        if (baseline := BASELINES[names[group]]) is not None:
            shaped = baseline(shaped) if len(shaped) > 1 else [0.0]
        found |= zip(rewards, np.clip(shaped, *reward.clip_range).tolist(), strict=True)
    return found


def _discounted(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Returns G_t = r_t + gamma * G_{t+1}."""
    returns, after = np.empty_like(rewards), 0.0
    for i in range(len(rewards) - 1, -1, -1):
        returns[i] = after = rewards[i] + gamma * after
    return returns
