"""Builds the hooks that users attach to a run, and those that installed packages attach to every run."""

from collections.abc import Sequence
from typing import Any

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.observability.hooks.base import Hook, failed
from openrlhf.plugins import registered
from openrlhf.registry import Registry

FLAG = "--train.hooks"
HOOKS = Registry("openrlhf.observability.hooks", Hook)


def hooks_of(names: Sequence[str] | None) -> list[Hook]:
    """Builds the hooks that `train.hooks` names. Raises UsageError, which names the flag, for one that cannot
    be imported or built."""
    return [_made(_class_of(name)) for name in names or ()]


def attached(place: str, config: Any, **about: Any) -> list[Hook]:
    """Builds the hooks of the entry points `openrlhf.attached.PLACE`, called with `about`, and with the
    configuration unless the place is a rank.

    Places: rl (prompts), supervised (engine, mesh, windows), and rank (worker), each rank of policy and
    critic. Raises UsageError if there is none although the run is to check its first steps.
    """
    about |= {} if place == "rank" else {"config": config}
    points = registered(f"attached.{place}").values()
    if config.train.verify_steps and not points:
        text = "no checks are installed, because openrlhf was installed before it had them; install it again"
        raise UsageError(
            ErrorCode.MISSING_PACKAGE, text, flag="--train.verify_steps", value=config.train.verify_steps
        )
    return [point.load()(**about) for point in points]


def check_hooks(names: Sequence[str] | None) -> None:
    """Raises UsageError for a hook that cannot be imported. Builds none."""
    for name in names or ():
        _class_of(name)


def _made(hook: type[Hook]) -> Hook:
    try:
        return hook()
    except Exception as error:
        raise failed(hook, "__init__", error, UsageError) from error


def _class_of(name: str) -> type[Hook]:
    try:
        return HOOKS[name]
    except KeyError:
        text = "there is no such hook; name a class as folder/file.py:NAME or package.module:NAME"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag=FLAG, value=name) from None
    except ValueError as error:
        raise UsageError(ErrorCode.USER_CODE, str(error), flag=FLAG, value=name) from error
