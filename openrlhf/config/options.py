"""Options of the classes that flags select: their fields become flags, `--algo.options.NAME`."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from openrlhf.config.fields import Field, list_flags
from openrlhf.errors import ErrorCode, UsageError

PREFIX = "algo.options."


def option_fields(selected: Mapping[str, type]) -> dict[str, Field]:
    """Returns the options of all selected classes by key.

    Args:
        selected: flag -> the class that it selects.

    Raises UsageError for an option whose type no flag can have, and for one that two classes share.
    """
    found: dict[str, Field] = {}
    for flag, owner in selected.items():
        for field in _list_fields(owner, flag):
            if (other := found.get(field.key)) and other.owner is not owner:
                classes = f"{owner.__name__} and {other.owner.__name__}"
                text = f"{classes} both have an option {field.name}; rename one of the two"
                raise UsageError(ErrorCode.CONFLICT, text, flag=f"--{flag}")
            found[field.key] = field
    return found


def option_defaults(selected: Mapping[str, type]) -> dict[str, Any]:
    """Returns the default of every option by key."""
    return {
        PREFIX + f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for owner in selected.values()
        for f in fields(owner)
        if f.init
    }


def _list_fields(owner: type, flag: str) -> list[Field]:
    options = [f.name for f in fields(owner) if f.init]
    if not options:
        return []
    try:
        declared = list_flags(owner)
        found = [Field(key=PREFIX + name, type=declared[name].type, owner=owner) for name in options]
        for field in found:
            _ = field.values  # raises for a type that no flag can have
    except (KeyError, NameError, TypeError) as error:
        text = f"{owner.__name__} has an option of a type that no flag can have ({error}); use int, float, "
        text += "str, bool, Literal, tuple, Annotated with a Range, or one of these | None"
        raise UsageError(ErrorCode.USER_CODE, text, flag=f"--{flag}") from error
    return found
