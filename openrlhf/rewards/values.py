"""Parses and validates the values that reward sources return."""

import math
from collections.abc import Sequence
from typing import Any

from openrlhf.agents.base import Reward, RewardError


class NotFinite(RewardError):
    """Raised for a reward that is NaN or infinite."""


def read_rewards(answer: Any, count: int, source: str = "reward_func") -> list[Reward]:
    """Parses the answer of a reward function or reward server into one Reward for each sample. Raises
    RewardError, which names the `source`, for an invalid answer.

    A valid answer is {"rewards": n values, "scores": n values (optional), "extra_logs": {name: n values, or
    one for all samples} (optional)}, or only the rewards. Values are a list, a tensor or an array of numbers
    or booleans, or of lists with one number. A single value needs no list.
    """
    if not isinstance(answer, dict):
        answer = {"rewards": answer}
    if "rewards" not in answer:
        raise RewardError(
            f"{source} returned a dict without 'rewards'; it has {', '.join(map(repr, answer)) or 'nothing'}"
        )
    rewards = read_floats("rewards", answer["rewards"], count, source)
    scores = (
        rewards if answer.get("scores") is None else read_floats("scores", answer["scores"], count, source)
    )
    extra_logs = answer.get("extra_logs") or {}
    if not isinstance(extra_logs, dict):
        raise RewardError(f"{source} returned extra_logs that are not a dict: {extra_logs!r}")
    logs = {
        str(name): read_floats(f"extra_logs[{name!r}]", value, count, source, one_is_for_all=True)
        for name, value in extra_logs.items()
    }
    return [
        Reward(
            reward=rewards[i], score=scores[i], extra_logs={name: values[i] for name, values in logs.items()}
        )
        for i in range(count)
    ]


def read_floats(name: str, value: Any, count: int, source: str, one_is_for_all: bool = False) -> list[float]:
    """Converts a list, a tensor, an array or a number to `count` finite floats. `one_is_for_all`: repeat a
    single value. Raises RewardError for other values."""
    values = _plain(value)
    if not isinstance(values, Sequence) or isinstance(values, str):
        values = [values]
    if len(values) == 1 and one_is_for_all:
        values = [values[0]] * count
    if len(values) != count:
        raise RewardError(f"{source} returned {len(values)} {name} for {count} samples")
    try:
        floats = [_float(v) for v in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"{source} returned {name} that are not numbers: {error}") from error
    if not all(math.isfinite(f) for f in floats):
        raise NotFinite(f"{source} returned {name} that are not finite: {floats}")
    return floats


def _float(value: Any) -> float:
    """Converts a number, or a list with one number, such as a row of an (n, 1) array."""
    value = _plain(value)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        return _float(value[0])
    return float(value)


def _plain(value: Any) -> Any:
    """Converts a tensor or an array to numbers and lists; returns other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value
