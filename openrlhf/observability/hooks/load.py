"""Builds the hooks that users attach to a run, and those that installed packages attach to every run."""

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

from openrlhf.errors import CodedError, ErrorCode, UsageError, first_line
from openrlhf.observability.hooks.base import Hook, failed
from openrlhf.plugins import entry_points
from openrlhf.registry import Registry

FLAG = "--train.hooks"
HOOKS = Registry("openrlhf.observability.hooks", Hook)
PLACES = ("rl", "supervised", "rank")
"""Places of a run to which packages attach hooks; see `attached`."""


def hooks_of(names: Sequence[str] | None) -> list[Hook]:
    """Builds the hooks that `train.hooks` names. Raises UsageError, which names the flag, for one that cannot
    be imported or built."""
    return [_made(_class_of(name)) for name in names or ()]


def attached(place: str, config: Any, **about: Any) -> list[Hook]:
    """Builds the hooks of the entry points `openrlhf.attached.PLACE`, called with `about`, and with the
    configuration unless the place is a rank.

    Places: rl (prompts), supervised (engine, mesh, windows), and rank (worker), each rank of policy and
    critic. Raises UsageError as `check_hooks` does, and for a hook that cannot be imported or built.
    """
    about |= {} if place == "rank" else {"config": config}
    return [_attach(point, about) for point in _points(place, config.train.verify_steps)]


def check_hooks(names: Sequence[str] | None, verify_steps: int) -> None:
    """Raises UsageError for a hook that cannot be imported, and if the run is to check its first steps and
    this installation does not have the checks. Builds none."""
    for name in names or ():
        _class_of(name)
    for place in PLACES:
        _points(place, verify_steps)


def _points(place: str, verify_steps: int) -> Sequence[EntryPoint]:
    points = list(entry_points(group=f"openrlhf.attached.{place}"))
    if verify_steps and not any(point.value.startswith("openrlhf.") for point in points):
        text = "the checks are not installed: openrlhf was installed before it had them. Install it again"
        raise UsageError(ErrorCode.MISSING_PACKAGE, text, flag="--train.verify_steps", value=verify_steps)
    return points


def _attach(point: EntryPoint, about: dict[str, Any]) -> Hook:
    try:
        return point.load()(**about)
    except CodedError:  # a check has found something
        raise
    except Exception as error:
        text = f"{first_line(error)}\nA package attaches this hook to every run; mend or remove the package."
        place = f"entry point {point.group}: {point.value}"
        raise UsageError(ErrorCode.USER_CODE, text, value=place) from error


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
