"""Dataset specifications `reasoning_gym:NAME?size=N&seed=S&...`: problems of the package reasoning-gym."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from openrlhf.config.pass_through import read_value
from openrlhf.errors import ErrorCode, UsageError

PREFIX = "reasoning_gym:"
GYM_VERIFIER = str(Path(__file__).parents[1] / "tasks" / "reasoning_gym_reward.py")
"""File of the reward function that verifies answers by the package."""
SIZE, SEED = 500, 42
"""Defaults of a specification without size or seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GymSpec:
    """A set of problems. The i-th one is determined by the name, the parameters, the seed and i."""

    name: str
    size: int = SIZE
    seed: int = SEED
    parameters: Mapping[str, Any]

    def overlaps(self, other: "GymSpec") -> bool:
        """Returns whether two sets share problems: the i-th problem of most datasets has the seed `seed +
        i`."""
        same = self.name == other.name and self.parameters == other.parameters
        return same and max(self.seed, other.seed) < min(self.seed + self.size, other.seed + other.size)


def is_gym(item: str) -> bool:
    return item.startswith(PREFIX)


def parse_gym(item: str) -> GymSpec:
    """Parses a specification. Values are JSON or else text, with %2C and %26 for commas and &. Raises
    UsageError without the flag's name, which the caller adds, if `item` is no specification."""
    name, _, query = item.removeprefix(PREFIX).partition("?")
    if not name:
        raise _invalid(f"names no dataset; write {PREFIX}NAME?size=1000&seed=1")
    values: dict[str, Any] = {}
    for setting in filter(None, query.split("&")):
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise _invalid(f"{setting!r} is no setting; write {PREFIX}{name}?size=1000&seed=1")
        if key in values:
            raise _invalid(f"{key} is set twice; set it once")
        values[key] = read_value(unquote(value))
    size, seed = values.pop("size", SIZE), values.pop("seed", SEED)
    for key, value, least in (("size", size, 1), ("seed", seed, 0)):
        if type(value) is not int or value < least:
            raise _invalid(f"{key}={value} must be a whole number of at least {least}")
    return GymSpec(name=name, size=size, seed=seed, parameters=values)


def _invalid(text: str) -> UsageError:
    return UsageError(ErrorCode.INVALID_VALUE, text)
