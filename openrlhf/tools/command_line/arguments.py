"""The argument parser of commands without a configuration class; lengths that follow from a model."""

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from openrlhf.api import ErrorCode, Explicit, UsageError, choose_hub, config_json, flag_values, waiting

PATIENCE = 15.0
"""Seconds of an import before a file of output mentions it; a terminal shows it sooner."""

_MESSAGES = (
    (r"argument ([^:]+): (.+)", ErrorCode.INVALID_VALUE, r"\2"),
    (r"the following arguments are required: (.+)", ErrorCode.MISSING_FLAG, "required, but not set"),
    (r"unrecognized arguments: (.+)", ErrorCode.UNKNOWN_FLAG, "there is no such option"),
)
"""Patterns of argparse's messages, whose first group is the flag, with the code and the text of our error."""

RUN = "run folder, or an output folder for its newest run"
"""Help of an argument that names a recorded run."""


class ArgumentParser(argparse.ArgumentParser):
    """Argument parser that raises UsageError instead of printing the usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        remedy = f"see `{self.prog} --help`"
        for pattern, code, text in _MESSAGES:
            if match := re.fullmatch(pattern, message, re.DOTALL):
                raise UsageError(code, f"{match.expand(text)}; {remedy}", flag=match[1])
        raise UsageError(ErrorCode.INVALID_VALUE, f"{message}; {remedy}")


def run(reference: str, *arguments: Any) -> Any:
    """Calls the function `module:name`, and imports its module only now: --help and wrong flags do not wait
    for large libraries."""
    module, _, name = reference.partition(":")
    with waiting("loading libraries", patience=PATIENCE):
        function = getattr(import_module(module), name)
    return function(*arguments)


def check_packages(remedies: Mapping[str, str]) -> None:
    """Raises UsageError if one is not installed. `remedies`: package -> what needs it, and its remedy."""
    for package, remedy in remedies.items():
        if find_spec(package) is None:
            raise UsageError(ErrorCode.MISSING_PACKAGE, f"{package} is not installed, and {remedy}")


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Returns the parser of whole numbers from `least` to `most`."""
    limits = f"at least {least}" + (f" and at most {most}" if most < math.inf else "")

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {limits}")
        return int(text)

    return parse


positive = whole(1)


def fitting_lengths(
    config: Any, explicit: Explicit, cluster: Sequence[int], *, flag: str, keys: Sequence[str]
) -> dict[str, int]:
    """Returns smaller values for those of the lengths `keys` that nobody set, with which the model that
    `flag` names reads the sum of all. For `parse`, which names a cluster that does not matter here."""
    values = flag_values(config)
    lengths = {key: values[key] for key in keys}
    free = [key for key in keys if key not in explicit]
    choose_hub(config.use_ms)
    room = _find_context(values[flag.removeprefix("--")] or "", flag) if free else None
    if room is None or sum(lengths.values()) <= room:
        return {}
    share = (room - sum(lengths[key] for key in keys if key in explicit)) // len(free)
    return {key: min(lengths[key], share) for key in free} if share > 0 else {}


def _find_context(path: str, flag: str) -> int | None:
    """Returns the model's maximum length; None without one. Imports transformers only if config.json does
    not tell."""
    settings = config_json(path)
    text = settings.get("text_config") or settings
    room = text.get("max_position_embeddings")
    scaling = str(text.get("rope_parameters") or text.get("rope_scaling"))
    if isinstance(room, int) and "factor" not in scaling:
        return room
    from openrlhf.api import find_max_length, load_config  # imports transformers

    return find_max_length(load_config(path, flag))
