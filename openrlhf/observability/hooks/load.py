"""Builds the hooks that users attach to a run, and those that installed packages attach to every run.

`OPENRLHF_SELFTEST=0` leaves out this package's own checks, for a run that a wrong one of them would stop.
"""

import os
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

from openrlhf.errors import CodedError, ErrorCode, UsageError, first_line, notify_once
from openrlhf.observability.hooks.base import Hook, failed
from openrlhf.plugins import entry_points
from openrlhf.registry import Registry

FLAG = "--train.hooks"
HOOKS = Registry("openrlhf.observability.hooks", Hook)
CHECKED, RECORDED = ("rl", "supervised", "rank"), ("observer", "model", "wire")
"""Places of a run to which packages attach hooks and functions: those of the checks; and those of what
records and judges a run, and of the APIs of the agents' server."""


def build_hooks(names: Sequence[str] | None) -> list[Hook]:
    """Builds the hooks that `train.hooks` names. Raises UsageError, which names the flag, for one that cannot
    be imported or built."""
    return [_made(_find_class(name)) for name in names or ()]


def attached(place: str, config: Any = None, **about: Any) -> list[Hook]:
    """Builds the hooks of the entry points `openrlhf.attached.PLACE`, called with `about`.

    Places: rl (config, prompts), supervised (config, engine, mesh, windows), rank (worker), each rank of
    policy and critic, and observer (observer). Raises UsageError as `check_hooks` does, and for a hook that
    cannot be imported or built.
    """
    about |= {"config": config} if place in ("rl", "supervised") else {}
    verify_steps = config.train.verify_steps if place in CHECKED else 0
    return [call(point, **about) for point in find_points(place, verify_steps)]


def check_hooks(names: Sequence[str] | None, verify_steps: int) -> None:
    """Raises UsageError for a hook that cannot be imported, and if this installation lacks what records a
    run, or the checks while the run is to check its first steps. Builds none."""
    for name in names or ():
        _find_class(name)
    for place in (*CHECKED, *RECORDED):
        find_points(place, verify_steps)


def find_points(place: str, verify_steps: int = 0) -> Sequence[EntryPoint]:
    """Returns the entry points of a place. Raises UsageError if this package needs one of its own there that
    is not installed."""
    points = list(entry_points(group=f"openrlhf.attached.{place}"))
    is_own = lambda point: point.value.startswith("openrlhf.")
    if place in CHECKED and os.environ.get("OPENRLHF_SELFTEST") == "0":
        notify_once("note: OPENRLHF_SELFTEST=0: this run does not check itself")
        return [point for point in points if not is_own(point)]
    is_missing = not any(map(is_own, points))
    if is_missing and place in RECORDED:
        text = "it is not installed: openrlhf was installed before it had this part. Install it again"
        raise UsageError(ErrorCode.MISSING_PACKAGE, text, value=f"entry point openrlhf.attached.{place}")
    if is_missing and verify_steps:
        text = "the checks are not installed: openrlhf was installed before it had them. Install it again"
        raise UsageError(ErrorCode.MISSING_PACKAGE, text, flag="--train.verify_steps", value=verify_steps)
    return points


def call(point: EntryPoint, *values: Any, **about: Any) -> Any:
    """Calls what an entry point names. Raises UsageError, which names the entry point, for an error of it."""
    try:
        return point.load()(*values, **about)
    except CodedError:  # a check has found something
        raise
    except Exception as error:
        text = f"{first_line(error)}\nA package attaches this to every run; mend or remove the package."
        place = f"entry point {point.group}: {point.value}"
        raise UsageError(ErrorCode.USER_CODE, text, value=place) from error


def _made(hook: type[Hook]) -> Hook:
    try:
        return hook()
    except Exception as error:
        raise failed(hook, "__init__", error, UsageError) from error


def _find_class(name: str) -> type[Hook]:
    text = "there is no such hook; name a class as folder/file.py:NAME or package.module:NAME"
    return HOOKS.choose(name, flag=FLAG, unknown=text)
