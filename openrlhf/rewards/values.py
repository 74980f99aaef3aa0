"""Parses and validates the values that reward sources return."""

import math
from collections.abc import Iterator, Sequence, ValuesView
from typing import Any

from openrlhf.agents.base import Reward, RewardError
from openrlhf.errors import notify_once

KEYS = ("rewards", "scores", "extra_logs", "extra_texts")
FORM = (
    "Details belong in {'rewards': [...], 'extra_logs': {name: [...]}}, each list with one for each sample."
)


LARGEST = 3.4e38
"""Largest value in float32, in which advantages are computed."""


class NotFinite(RewardError):
    """Raised for a reward that is NaN, or infinite in float32."""


class WrongNumber(RewardError):
    """Raised for more or fewer values than samples: no smaller call tells which value is whose."""


def read_rewards(answer: Any, count: int, source: str = "reward_func") -> list[Reward]:
    """Parses the answer of a reward function or reward server into one Reward for each sample. Raises
    RewardError, which names the `source`, for an invalid answer.

    A valid answer is {"rewards": n values, "scores": n values (optional), "extra_logs": {name: n values, or
    one for all samples} (optional), "extra_texts": {name: n texts, or one for all samples} (optional)}, or
    only the rewards. Values are a list, an iterator, a tensor or an array of numbers or booleans, or of lists
    with one number. A single value needs no list.
    """
    if not isinstance(answer, dict):
        answer = {"rewards": answer}
    if "rewards" not in answer:
        raise RewardError(
            f"{source} returned a dict without 'rewards'; it has {', '.join(map(repr, answer)) or 'nothing'}"
        )
    if unread := [str(key) for key in answer if key not in KEYS]:
        notify_once(f"note: {source} returned {', '.join(unread)}, not read; metrics belong in extra_logs")
    rewards = read_floats("rewards", answer["rewards"], count, source)
    scores = (
        rewards if answer.get("scores") is None else read_floats("scores", answer["scores"], count, source)
    )
    logs = {
        name: read_floats(f"extra_logs[{name!r}]", value, count, source, one_is_for_all=True)
        for name, value in named("extra_logs", answer, source)
    }
    texts = read_texts(answer, count, source)
    return [
        Reward(
            reward=rewards[i],
            score=scores[i],
            extra_logs={name: values[i] for name, values in logs.items()},
            extra_texts=texts[i],
        )
        for i in range(count)
    ]


def named(key: str, answer: dict, source: str) -> Iterator[tuple[str, Any]]:
    """Yields the names and values in the dictionary `answer[key]`; nothing if it is missing or None. Raises
    RewardError if it is no dictionary."""
    found = _plain(answer.get(key)) or {}
    if not isinstance(found, dict):
        raise RewardError(f"{source} returned {key} that are not a dict: {found!r}")
    yield from ((str(name), value) for name, value in found.items())


def read_texts(answer: dict, count: int, source: str) -> list[dict[str, str]]:
    """Returns the `extra_texts` of each sample by name, without those that are None. A single text is for
    all samples. Raises RewardError for other values."""
    texts: list[dict[str, str]] = [{} for _ in range(count)]
    for name, value in named("extra_texts", answer, source):
        value = _plain(value)
        values = [value] * count if isinstance(value, str | None) else value
        if not isinstance(values, Sequence) or not all(isinstance(v, str | None) for v in values):
            raise RewardError(f"{source} returned extra_texts[{name!r}] that are not texts: {value!r}")
        if len(values) != count:
            raise WrongNumber(f"{source} returned {len(values)} extra_texts[{name!r}] for {count} samples")
        for own, text in zip(texts, values, strict=True):
            own |= {} if text is None else {name: text}
    return texts


def read_floats(name: str, value: Any, count: int, source: str, one_is_for_all: bool = False) -> list[float]:
    """Converts a list, a tensor, an array or a number to `count` finite floats. `one_is_for_all`: repeat a
    single value. Raises RewardError for other values."""
    values, remedy = _plain(value), ""
    if isinstance(values, Iterator | ValuesView):
        values = list(values)
    if not isinstance(values, Sequence) or isinstance(values, str):
        values, remedy = (
            [values],
            f": it is a {type(value).__name__}. Return a list, with one for each sample",
        )
    if len(values) == 1 and one_is_for_all:
        values = [values[0]] * count
    if len(values) != count:
        raise WrongNumber(f"{source} returned {len(values)} {name} for {count} samples{remedy}")
    floats = []
    for i, own in enumerate(values):
        try:
            floats.append(_float(own))
        except (TypeError, ValueError, OverflowError) as error:
            form = f".\n{FORM}" if isinstance(_plain(own), dict | Sequence) else ""
            text = f"{source} returned {name} that are not numbers: {error} (sample {i} of {count}){form}"
            raise RewardError(text) from error
    if wrong := {i: f for i, f in enumerate(floats) if not math.isfinite(f) or abs(f) > LARGEST}:
        text = f"{source} returned {name} that are not finite: {list(wrong.values())[:8]}"
        raise NotFinite(f"{text} (samples {', '.join(map(str, list(wrong)[:8]))} of {count})")
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
