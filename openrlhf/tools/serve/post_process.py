"""Turns scored answers into rows for the next round of training.

Pure functions on rows {"input", "output", "reward", …}.
"""

import json
import statistics
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from openrlhf.api import ErrorCode, UsageError

Row = dict[str, Any]


def keep_best(rows: Sequence[Row]) -> list[Row]:
    """Rejection sampling: returns each input's answer with the highest reward, the first of equal ones."""
    return [max(group, key=_reward) for group in _by_input(rows)]


def write_rewards(rows: Sequence[Row], template: str, *, normalize: bool) -> list[Row]:
    """Conditional SFT: replaces every input by `template` with `{input}` and `{reward}` filled in, the reward
    with two decimals.

    normalize: rewards become z-scores over all rows, (reward - mean) / std with the population standard
    deviation; where all are equal they become 0.
    """
    rewards = [_reward(row) for row in rows]
    if normalize:
        mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
        rewards = [(reward - mean) / std if std else 0.0 for reward in rewards]
    return [
        row | {"input": _written(template, row["input"], reward), "reward": reward}
        for row, reward in zip(rows, rewards, strict=True)
    ]


def best_and_worst(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """Iterative DPO: returns the best and the worst answer to each input, the first of equal ones, and the
    number of inputs dropped because their rewards are all equal."""
    pairs: list[Row] = []
    groups = _by_input(rows)
    for group in groups:
        best, worst = max(group, key=_reward), min(group, key=_reward)
        if _reward(best) > _reward(worst):
            pairs.append(
                {
                    "prompt": best["input"],
                    "chosen": best["output"],
                    "chosen_reward": best["reward"],
                    "rejected": worst["output"],
                    "rejected_reward": worst["reward"],
                }
            )
    return pairs, len(groups) - len(pairs)


def _by_input(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row["input"]), []).append(row)
    return list(groups.values())


_reward = itemgetter("reward")


def _written(template: str, prompt: Any, reward: float) -> str:
    if not isinstance(prompt, str):
        text = "inputs are messages, and a reward can only be written into text.\nUse prompts that are text."
        raise UsageError(ErrorCode.CONFLICT, text, flag="--post_processor", value="csft")
    two_decimals = f"{round(reward, 2) + 0.0:.2f}"  # never -0.00
    return prompt.join(piece.replace("{reward}", two_decimals) for piece in template.split("{input}"))
