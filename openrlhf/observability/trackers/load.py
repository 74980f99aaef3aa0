"""From the flags to the trackers of a run."""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from openrlhf.config.fields import convert
from openrlhf.config.sections import LoggerConfig
from openrlhf.observability import trackers
from openrlhf.observability.trackers.base import TrackedRun, Tracker
from openrlhf.plugins import file_of, is_reference, load, registered, resolve
from openrlhf.user_file import located

FLAG, OPTIONS = "--logger.trackers", "--logger.tracker_options"
Asked = tuple[str, type[Tracker], dict[str, Any]]
"""A tracker's name in the flags, its class, and its options."""


def check_trackers(logger: LoggerConfig) -> None:
    """Imports the trackers that the flags ask for, in this process.

    Raises ValueError, which names the flag, for one that cannot be imported or made with its options.
    """
    for _ in _asked(logger):
        pass


def trackers_of(run: TrackedRun) -> list[Tracker]:
    """Makes the trackers that the flags ask for. Raises ValueError for what a user's constructor raises."""
    return [_made(run, *asked) for asked in _asked(run.logger)]


def ours() -> dict[str, type[Tracker]]:
    """Maps the name of each file of this folder to the tracker in it."""
    found = {}
    for name in (module.name for module in pkgutil.iter_modules(trackers.__path__)):
        module = importlib.import_module(f"{trackers.__name__}.{name}")
        for value in vars(module).values():
            if _is_tracker(value) and value.__module__ == module.__name__ and not inspect.isabstract(value):
                found[name] = value
    return found


def _asked(logger: LoggerConfig) -> Iterator[Asked]:
    """Yields each tracker once."""
    flags = {} if logger.tensorboard_dir is None else {"tensorboard": "--logger.tensorboard_dir"}
    flags |= {"wandb": "--logger.wandb.key"} if logger.wandb.is_used else {}
    names = dict.fromkeys([*flags, *(logger.trackers or ())])
    classes = {name: _class_of(name) for name in names}
    given = _given(logger.tracker_options or (), classes)
    for name, cls in classes.items():
        flag = flags.get(name, f"{FLAG} {name}")
        if cls.package and importlib.util.find_spec(cls.package) is None:
            raise ValueError(
                f"{flag}: needs the package {cls.package}.\n"
                f"Run `{cls.remedy}`, or leave the flag out: metrics.jsonl is always written."
            )
        types = _options_of(cls, name)
        options = {option: value for option, value in given.items() if option in types}
        values = {option: _value(option, text, types[option]) for option, text in options.items()}
        signature = inspect.signature(cls)
        try:
            signature.bind(None, **values)
        except TypeError as error:
            raise ValueError(
                f"{flag}: {cls.__name__}{signature} cannot be made with a run and its options: {error}.\n"
                f"An option is set by {OPTIONS} NAME=VALUE."
            ) from None
        yield name, cls, values


def _class_of(name: str) -> type[Tracker]:
    if found := ours().get(name):
        return found
    reference = resolve(name, "trackers")
    if not is_reference(reference) and not file_of(reference):
        known = ", ".join([*ours(), *registered("trackers")])
        raise ValueError(
            f"{FLAG} {name}: there is no such tracker. There are {known}.\nOne of yours is named as "
            "folder/file.py:NAME or package.module:NAME."
        )
    found = load(reference, flag=FLAG)
    if not _is_tracker(found):
        raise ValueError(
            f"{FLAG} {reference}: is no subclass of {Tracker.__module__}.Tracker, which says what to define."
        )
    if inspect.isabstract(found):
        raise ValueError(f"{FLAG} {reference}: {found.__name__} does not define log(self, step, metrics).")
    return found


def _is_tracker(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Tracker)


def _given(words: tuple[str, ...], classes: Mapping[str, type[Tracker]]) -> dict[str, str]:
    """Maps the options that the flag sets to their words."""
    there = {option: cls for name, cls in classes.items() for option in _options_of(cls, name)}
    known = ", ".join(f"{option} (of {cls.__name__})" for option, cls in there.items())
    given = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{OPTIONS} {word}: expects NAME=VALUE")
        if option not in there:
            raise ValueError(
                f"{OPTIONS} {word}: no tracker has this option; "
                + (f"there are {known}" if known else "they have none")
            )
        given[option] = value
    return given


def _options_of(cls: type[Tracker], name: str) -> dict[str, Any]:
    """Maps the keywords of the constructor behind the run to their type hints, text without one."""
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    named = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    try:
        hints = get_type_hints(cls.__init__) if named else {}
    except NameError as error:
        raise ValueError(f"{FLAG} {name}: a type hint of {cls.__name__} cannot be read: {error}") from None
    return {option: hints.get(option, str) for option in named}


def _value(option: str, text: str, type_: Any) -> Any:
    try:
        return convert([text], type_)
    except ValueError as error:
        raise ValueError(f"{OPTIONS} {option}={text}: {error}") from None


def _made(run: TrackedRun, name: str, cls: type[Tracker], options: Mapping[str, Any]) -> Tracker:
    try:
        return cls(run, **options)
    except Exception as error:
        if name in ours():
            raise
        raise ValueError(f"{FLAG} {located(error, resolve(name, 'trackers'))}") from error
