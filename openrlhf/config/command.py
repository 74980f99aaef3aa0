"""A command of `openrlhf` as its configuration knows it, and the problems that its checks find."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from openrlhf.config.old_flags import OldFlag

ConfigT = TypeVar("ConfigT")

SECRETS = ("logger.wandb.key", "api_key")
"""Never printed and never written to a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """How a flag came to be set."""

    file: str = ""
    """The file and line, or the variable; "" for the command line."""
    old: str = ""
    """The old spelling that was used; "" for today's name."""
    shared: bool = False
    """The old spelling also set other flags."""


Explicit = Mapping[str, Source]
"""The flags that somebody set, by key."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a flag, so that nothing starts."""

    key: str
    """The flag it is about."""
    text: str
    """What is wrong, and what to do."""
    fatal: bool = True
    """False for a remark."""


def remark(key: str, text: str) -> Problem:
    """Makes a problem that is only told: the command starts all the same."""
    return Problem(key, text, fatal=False)


@dataclass(frozen=True, slots=True)
class NotYet:
    """A flag whose feature does not exist: anything but its default is refused."""

    what: str
    """The feature."""
    why: str = ""
    """The reason why it does not work."""

    @property
    def state(self) -> str:
        return f"not available yet{self.why and ': '}{self.why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command(Generic[ConfigT]):
    name: str
    """As in `openrlhf NAME`."""
    config_type: type[ConfigT]
    summary: str
    old_flags: Mapping[str, OldFlag]
    problems: Callable[[ConfigT, Explicit], list[Problem]]
    """Lists what is wrong between flags. Fatal problems do not depend on values that `resolve` may choose."""
    placed: Callable[[ConfigT, Explicit], list[Problem]] = lambda config, explicit: []
    """Lists what is wrong with the placement, given the values that `resolve` chose."""
    selected: Callable[[ConfigT], Mapping[str, type]] = lambda config: {}
    """Flag -> the class that it selects, whose fields are options."""
    not_yet: Mapping[str, NotYet] = field(default_factory=dict)
    """By flag. `--help` and docs/flags.md say so too."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Flag -> the variable of the environment that sets it where nothing else does."""
    has_plan: bool = False
    """It places its processes on a cluster: `--print_plan` says where."""
