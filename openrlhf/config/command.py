"""Declares a command of `openrlhf`: its configuration, its checks, and the problems that they report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from openrlhf.config.old_flags import OldFlag
from openrlhf.errors import ErrorCode

ConfigT = TypeVar("ConfigT")

SECRETS = ("logger.wandb.key", "api_key")
"""Flags whose values are never printed or written to a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The place where a flag was set."""

    file: str = ""
    """File and line, or the environment variable; "" for the command line."""
    old: str = ""
    """The old spelling that was used; "" for the current name."""
    shared: bool = False
    """True if the old spelling also set other flags."""


Explicit = Mapping[str, Source]
"""The flags that were set explicitly, by key."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with a flag, because of which nothing starts if it is fatal."""

    key: str
    """Key of the flag."""
    text: str
    """Description of the problem and the remedy."""
    code: ErrorCode = ErrorCode.CONFLICT
    fatal: bool = True
    """False for a remark."""


def remark(key: str, text: str) -> Problem:
    """Builds a non-fatal problem: it is printed, and the command starts."""
    return Problem(key, text, fatal=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command(Generic[ConfigT]):
    name: str
    """Name of the command, as in `openrlhf NAME`."""
    config_type: type[ConfigT]
    summary: str
    old_flags: Mapping[str, OldFlag]
    problems: Callable[[ConfigT, Explicit], list[Problem]]
    """Checks flags against each other. Fatal problems do not depend on values that `resolve` may choose."""
    placed: Callable[[ConfigT, Explicit], list[Problem]] = lambda config, explicit: []
    """Checks the placement, given the values that `resolve` chose."""
    selected: Callable[[ConfigT], Mapping[str, type]] = lambda config: {}
    """Maps flags to the classes that they select, whose fields are options."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Maps flags to environment variables, which set them if nothing else does."""
    has_plan: bool = False
    """True if the command places processes on a cluster, so that `--print_plan` is available."""
