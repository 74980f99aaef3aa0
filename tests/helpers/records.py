"""Builders of reinforcement learning records from plain lists, and conversions back to lists."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.advantages.base import StepView
from openrlhf.algorithms.policy_losses.base import RowView
from openrlhf.rows import LossNorm, Sample
from openrlhf.types import Batch, Nuclei, Outcome, Prompt, PromptGroup, Trajectory, runs

DTYPES = {
    "token_ids": np.int32,
    "action_mask": np.bool_,
    "rollout_log_probs": np.float32,
    "turn_starts": np.int32,
    "turn_rewards": np.float32,
}


def trajectory(
    reward: float | None = 1.0,
    actions: Sequence[int] = (2,),
    *,
    prompt: Prompt | None = None,
    prompt_id: int = 0,
    epoch: int = 0,
    text: str = "",
    source: str = "default",
    versions: Sequence[int] | None = None,
    **changes: Any,
) -> Trajectory:
    """Returns a trajectory of a prompt of the token 1 and then `actions`; it is a failed one if the reward is
    None. `versions`: weight version of each action. `changes`: other fields, with arrays given as lists."""
    token_ids = changes.pop("token_ids", [1, *actions])
    mask = changes.pop("action_mask", [False] + [True] * (len(token_ids) - 1))
    failed = reward is None
    values = {
        "prompt": prompt or Prompt(prompt_id=prompt_id, text=text, source=source, epoch=epoch),
        "sample_index": 0,
        "token_ids": token_ids,
        "action_mask": mask,
        "rollout_log_probs": [-1.0] * sum(mask),
        "weight_versions": runs([0] * sum(mask) if versions is None else versions),
        "reward": reward,
        "score": reward,
        "outcome": Outcome.REWARD_ERROR if failed else Outcome.OK,
        "error": "no opinion" if failed else "",
    } | changes
    arrays = {name: np.array(values[name], dtype) for name, dtype in DTYPES.items() if name in values}
    return Trajectory(**(values | arrays))


def sequence(token_ids: Sequence[int] | np.ndarray | Tensor, prompt: int = 1) -> Sample:
    """Returns a sample whose tokens after the first `prompt` ones are actions."""
    ids = torch.tensor(np.asarray(token_ids)).long()
    return Sample(token_ids=ids, action_mask=torch.arange(len(ids)) >= prompt)


def kept_sets(*sets: Sequence[int], shares: Sequence[float] | None = None) -> Nuclei:
    """Returns kept sets, one for each action; an empty set stands for all tokens."""
    return Nuclei(
        ids=np.array([token for one in sets for token in one], np.int32),
        counts=np.array([len(one) for one in sets], np.int32),
        log_masses=np.log(np.array(shares or [1.0] * len(sets))).astype(np.float32),
    )


def sets_of(kept: Nuclei | None, num_actions: int) -> list[list[int]]:
    """Returns the kept set of each action as a list; the inverse of `kept_sets`."""
    if kept is None:
        return [[]] * num_actions
    assert len(kept.counts) == len(kept.log_masses) == num_actions
    return [part.tolist() for part in np.split(kept.ids, kept.counts.cumsum())[:-1]]


def group_of(prompt: Prompt, rewards: Sequence[float | None]) -> PromptGroup:
    """Returns a group of samples with two tokens each and these rewards."""
    samples = [trajectory(r, prompt=prompt, sample_index=i) for i, r in enumerate(rewards)]
    return PromptGroup(prompt=prompt, trajectories=samples)


def batch_of(trajectories: Sequence[Trajectory], **columns: Any) -> Batch:
    """Returns a batch of trajectories. `columns`: (A,) values of all actions, or one value for every action.
    Advantages and returns default to 0."""
    batch = Batch.of(trajectories)
    count = int(batch.num_actions.sum())
    columns = {"advantages": 0.0, "returns": 0.0} | columns
    return replace(batch, **{name: column(value, count) for name, value in columns.items()})


def column(value: Any, count: int) -> np.ndarray:
    """Returns a (A,) column from one value, or from a value for each action."""
    array = np.asarray(value, None if hasattr(value, "dtype") else np.float32)
    return array if array.ndim else np.full(count, array)


def by_sequence(batch: Batch, column: np.ndarray) -> list[np.ndarray]:
    """Splits a (A,) column into the values of each sequence."""
    return np.split(column, batch.num_actions.cumsum()[:-1])


def plain(value: Any) -> Any:
    """Converts records and arrays to dictionaries and lists with the arrays' types, which can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return value


def step_view(rewards: Tensor, group_ids: Tensor, **changes: Any) -> StepView:
    """Returns a view of episodes with one turn and one action each; `changes` replaces fields."""
    ones = torch.ones(len(rewards), dtype=torch.long)
    values = {
        "named_rewards": {"score": rewards},
        "lengths": ones,
        "turns": ones,
        "truncated": ones == 0,
        "episodes": ones.cumsum(0) - 1,
        "counts": ones,
        "log_probs": None,
        "rollout_log_probs": torch.zeros(len(rewards)),
        "ref_log_probs": None,
        "values": None,
        "gamma": 1.0,
        "lambd": 1.0,
    }
    return StepView(rewards=rewards, group_ids=group_ids, **(values | changes))


def row_view(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, **changes: Any) -> RowView:
    """Returns a view of one sequence, clipped to [0.8, 1.2]; `changes` replaces fields."""
    values = {
        "counts": torch.tensor([len(log_probs)]),
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "proximal_log_probs": (log_probs - log_ratio).detach(),
        "old_log_probs": None,
        "rollout_log_probs": log_probs.detach(),
        "staleness": None,
        "entropy": None,
        "norm": LossNorm(len(log_probs), 1),
    }
    return RowView(log_probs=log_probs, log_ratio=log_ratio, advantages=advantages, **(values | changes))


def record_of(observer: Any) -> Any:
    """Returns the hook of a run's observer that records rollouts."""
    return next(guest for guest in observer.guests if hasattr(guest, "journal"))
