"""Builds the trackers of a run from the flags."""

import importlib.util
import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from openrlhf.config.fields import convert
from openrlhf.config.options import PREFIX, option_fields
from openrlhf.config.sections import LoggerConfig
from openrlhf.errors import ErrorCode, UsageError, first_line
from openrlhf.observability.trackers.base import TrackedRun, Tracker
from openrlhf.registry import Registry
from openrlhf.user_file import line_and_error

logger = logging.getLogger(__name__)

FLAG, OPTIONS = "--logger.trackers", "--logger.tracker_options"
TRACKERS = Registry("openrlhf.observability.trackers", Tracker)


def build_trackers(logger: LoggerConfig) -> list[Tracker]:
    """Builds the trackers that the flags select, without opening them. Raises UsageError, which names the
    flag, if a tracker cannot be imported, lacks its package or does not have a given option."""
    flags = {} if logger.tensorboard_dir is None else {"tensorboard": "--logger.tensorboard_dir"}
    flags |= {"wandb": "--logger.wandb.key"} if logger.wandb.is_used else {}
    names = dict.fromkeys([*flags, *(logger.trackers or ())])
    classes = {flags.get(name, f"{FLAG} {name}"): _find_class(name) for name in names}
    for place, cls in classes.items():
        if cls.package and importlib.util.find_spec(cls.package) is None:
            flag, _, name = place.partition(" ")
            text = (
                f"needs the package {cls.package}.\n"
                f"Run `{cls.remedy}`, or leave the flag out: metrics.jsonl is always written."
            )
            raise UsageError(ErrorCode.MISSING_PACKAGE, text, flag=flag, value=name)
    options = _options(logger.tracker_options or (), classes)
    return [cls.of(options) for cls in classes.values()]


def open_trackers(run: TrackedRun) -> list[Tracker]:
    """Builds and opens the trackers that the flags select. Leaves out a built-in tracker that does not open,
    with a warning. Raises UsageError for any exception of a user's tracker."""
    made = []
    for tracker in build_trackers(run.logger):
        try:
            tracker.open(run)
            made.append(tracker)
        except UsageError:
            raise
        except Exception as error:
            if type(tracker).__module__.startswith("openrlhf."):
                problem = f"{type(error).__name__}: {first_line(error)}"
                logger.warning("%s is off (%s); metrics.jsonl has everything", tracker.name, problem)
                continue
            file = inspect.getsourcefile(type(tracker)) or type(tracker).__module__
            raise UsageError(
                ErrorCode.USER_CODE, line_and_error(error, file), flag=FLAG, value=file
            ) from error
    return made


def _find_class(name: str) -> type[Tracker]:
    text = (
        f"there is no such tracker; use {', '.join(sorted(TRACKERS.names))},\n"
        "or your own as folder/file.py:NAME or package.module:NAME"
    )
    return TRACKERS.choose(name, flag=FLAG, unknown=text)


def _options(words: Sequence[str], classes: Mapping[str, type[Tracker]]) -> dict[str, Any]:
    """Parses the words of --logger.tracker_options to {option: value}. `classes`: flag that selects a tracker
    -> its class."""
    fields = option_fields({flag.removeprefix("--"): cls for flag, cls in classes.items()})
    there = ", ".join(f"{field.name} (of {field.owner.__name__})" for field in fields.values())
    options = {}
    for word in words:
        name, equals, value = word.partition("=")
        wrong = partial(UsageError, flag=OPTIONS, value=word)
        if not equals:
            raise wrong(ErrorCode.INVALID_VALUE, "expects NAME=VALUE")
        if (field := fields.get(PREFIX + name)) is None:
            others = f"available: {there}" if there else "they have no options"
            raise wrong(ErrorCode.UNKNOWN_FLAG, f"no tracker has this option; {others}")
        try:
            options[name] = convert([value], field.type)
        except ValueError as error:
            raise wrong(ErrorCode.INVALID_VALUE, str(error)) from None
    return options
