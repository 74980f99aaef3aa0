"""What a run did: every trajectory of every step, one JSON line each.

A line of `rollouts/step_000012.jsonl`:

    prompt_id, episode, sample_index, seed, source, label     where the trajectory comes from
    prompt, response                                          text; response is null without a decoder
    token_ids                                                 [L]
    action_ranges                                             [[start, end], ...] of actions in token_ids
    rollout_log_probs                                         [A]
    weight_versions                                           [[version, count], ...] adding up to A
    reward, score, outcome, error, finish_reason, truncated, extra_logs
    advantage                                                 mean over the actions; absent when not given

NaN and infinities are the strings "NaN", "Infinity" and "-Infinity".
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from openrlhf.files import write_atomically
from openrlhf.observe.run_folder import read_jsonl, to_json
from openrlhf.types import Outcome, Prompt, Trajectory


class Decode(Protocol):
    """What token ids say after others: `openrlhf.utils.decode` of a tokenizer."""

    def __call__(self, token_ids: list[int], /, *, after: list[int]) -> str: ...


def write_journal(
    rollouts: Path,
    step: int,
    trajectories: Sequence[Trajectory],
    *,
    decode: Decode | None = None,
    advantages: Sequence[float] | None = None,
    name: str = "step",
) -> Path:
    """Write `{rollouts}/{name}_{step}.jsonl`, replacing it if it is there. A reader never sees a part of it.

    `advantages` has one number per trajectory. `name` keeps trajectories
    that are not of training apart, e.g. "eval".
    """
    rows = (_row(trajectory, decode) for trajectory in trajectories)
    if advantages is not None:
        rows = (row | {"advantage": float(a)} for row, a in zip(rows, advantages, strict=True))
    path = rollouts / f"{name}_{step:06d}.jsonl"
    write_atomically(path, (to_json(row) + "\n" for row in rows))
    return path


def read_journal(path: Path) -> list[Trajectory]:
    """The trajectories that were written. A label that JSON cannot hold comes back as its repr."""
    return [_trajectory(row) for row in read_jsonl(path)]


def journal_steps(rollouts: Path, name: str = "step") -> dict[int, Path]:
    """Step -> file, in the order of steps."""
    files = {int(path.stem.rpartition("_")[2]): path for path in rollouts.glob(f"{name}_*.jsonl")}
    return dict(sorted(files.items()))


def response_of(trajectory: Trajectory, decode: Decode) -> str:
    """What followed the prompt, as text."""
    token_ids, start = trajectory.token_ids.tolist(), trajectory.prompt_length
    return decode(token_ids[start:], after=token_ids[:start])


def _row(trajectory: Trajectory, decode: Decode | None) -> dict[str, Any]:
    t = trajectory
    return {
        "prompt_id": t.prompt.prompt_id,
        "episode": t.prompt.episode,
        "sample_index": t.sample_index,
        "seed": t.seed,
        "source": t.prompt.source,
        "label": t.prompt.label,
        "prompt": t.prompt.text,
        "response": response_of(t, decode) if decode else None,
        "reward": t.reward,
        "score": t.score,
        "outcome": t.outcome.value,
        "error": t.error,
        "finish_reason": t.finish_reason,
        "truncated": t.truncated,
        "extra_logs": t.extra_logs,
        "token_ids": t.token_ids.tolist(),
        "action_ranges": _true_ranges(t.action_mask.tolist()),
        "rollout_log_probs": t.rollout_log_probs.tolist(),
        "weight_versions": t.weight_versions.tolist(),
    }


def _trajectory(row: dict[str, Any]) -> Trajectory:
    token_ids = np.array(row["token_ids"], np.int32)
    action_mask = np.zeros(len(token_ids), np.bool_)
    for start, end in row["action_ranges"]:
        action_mask[start:end] = True
    return Trajectory(
        prompt=Prompt(
            prompt_id=row["prompt_id"],
            text=row["prompt"],
            label=row["label"],
            source=row["source"],
            episode=row["episode"],
        ),
        sample_index=row["sample_index"],
        token_ids=token_ids,
        action_mask=action_mask,
        rollout_log_probs=np.array(row["rollout_log_probs"], np.float32),
        weight_versions=np.array(row["weight_versions"], np.int32).reshape(-1, 2),
        reward=None if row["reward"] is None else float(row["reward"]),
        score=None if row["score"] is None else float(row["score"]),
        outcome=Outcome(row["outcome"]),
        error=row["error"],
        finish_reason=row["finish_reason"],
        truncated=row["truncated"],
        seed=row["seed"],
        extra_logs={name: float(value) for name, value in row["extra_logs"].items()},
    )


def _true_ranges(mask: Sequence[bool]) -> list[list[int]]:
    """[[start, end), ...] where `mask` is True."""
    ranges, start = [], 0
    for value, run in groupby(mask):
        end = start + len(list(run))
        if value:
            ranges.append([start, end])
        start = end
    return ranges
