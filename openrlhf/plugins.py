"""Objects that users plug in.

A reference is `package.module:Name` or `folder/file.py:Name`. Installed packages register names as entry
points of the groups `openrlhf.KIND`.
"""

import hashlib
import importlib
import inspect
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from openrlhf.user_file import import_file, import_problem


def is_reference(name: str) -> bool:
    """Whether `name` says where an object is defined, and is not the name of one of ours."""
    return ":" in name and "://" not in name


def file_of(reference: str) -> str | None:
    """Returns the path in `folder/file.py:Name`; None for an object of an importable module."""
    path, _, _ = reference.rpartition(":")
    return path if path.endswith(".py") else None


def registered(kind: str) -> dict[str, EntryPoint]:
    """Maps names to the entry points that installed packages register in the group `openrlhf.KIND`."""
    return {point.name: point for point in entry_points(group=f"openrlhf.{kind}")}


def load(reference: str, *, flag: str) -> Any:
    """Imports the object that `reference` names.

    Raises ValueError where the module cannot be imported or lacks the object. It names the flag, the file
    with its line, and what the module has instead.
    """
    place, _, name = reference.rpartition(":")
    try:
        module = _module(place)
    except FileNotFoundError:
        raise ValueError(f"{flag} {reference}: there is no file {place}") from None
    except Exception as error:
        raise ValueError(f"{flag} {reference}: {import_problem(error, place)}") from error
    if not hasattr(module, name):
        own = [n for n, x in vars(module).items() if inspect.getmodule(x) is module and not n.startswith("_")]
        raise ValueError(f"{flag} {reference}: {place} has no {name}. It has {', '.join(own) or 'nothing'}.")
    return getattr(module, name)


def digest(reference: str) -> str:
    """Returns a fingerprint of the source file that the reference names."""
    place = file_of(reference)
    if place is None:
        place = inspect.getsourcefile(importlib.import_module(reference.rpartition(":")[0]))
    if place is None:  # a module without a source: only its name is known
        return reference
    return hashlib.sha256(Path(place).read_bytes()).hexdigest()[:16]


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve(strict=True)
    return import_file(str(path), f"user_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}")
