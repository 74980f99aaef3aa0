"""Finds and imports objects that users plug in.

A reference is `package.module:Name` or `folder/file.py:Name`. Installed packages register names as entry
points in the groups `openrlhf.KIND`.
"""

import hashlib
import inspect
import os
import sys
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

from openrlhf.user_file import UnusableFile, fingerprint, import_place, import_remedy, read_sources, split


def is_reference(name: str) -> bool:
    """Tells whether `name` is a reference to where an object is defined, not a built-in or registered
    name."""
    return ":" in name and "://" not in name


def parse_file(reference: str) -> str | None:
    """Returns the path in `folder/file.py:Name` and in a bare `folder/file.py`; None for anything else."""
    place, _ = split(reference)
    return place if place.endswith(".py") else None


def entry_points(group: str) -> EntryPoints:
    """Returns the entry points of a group. The installed packages, which are hundreds, are read again only
    after a folder of the import path has changed."""
    places = tuple(place or os.curdir for place in sys.path)
    changes = tuple(os.stat(place).st_mtime_ns if os.path.exists(place) else 0 for place in places)
    return _all_entry_points(places, changes).select(group=group)


@lru_cache(maxsize=1)
def _all_entry_points(places: tuple[str, ...], changes: tuple[int, ...]) -> Any:
    return metadata.entry_points()  # EntryPoints; in Python 3.11 a class that has `select` too


def registered(kind: str) -> dict[str, EntryPoint]:
    """Maps names to the entry points that installed packages register in the group `openrlhf.KIND`."""
    return {point.name: point for point in entry_points(f"openrlhf.{kind}")}


def resolve(name: str, kind: str) -> str:
    """Returns the reference that a registered name stands for; any other name unchanged."""
    if is_reference(name) or parse_file(name) or (point := registered(kind).get(name)) is None:
        return name
    return f"{point.module}:{point.attr}"


def load(reference: str) -> Any:
    """Imports the object that `reference` names.

    Raises UnusableFile if the module cannot be imported or lacks the object. The message has the line of the
    file, or the objects that the module has; the caller adds the flag and its value.
    """
    place, name = split(reference)
    if parse_file(reference) and not Path(place).is_file():
        raise UnusableFile(f"there is no file {place}")
    try:
        module = import_place(*_as_module(place))
    except (Exception, SystemExit) as error:
        raise UnusableFile(import_remedy(error, reference)) from error
    if not hasattr(module, name):
        own = [n for n, x in vars(module).items() if inspect.getmodule(x) is module and not n.startswith("_")]
        problem = f"{place} has no {name}" if name else f"say which object of {place}"
        raise UnusableFile(f"{problem}. It has {', '.join(own) or 'nothing'}.")
    return getattr(module, name)


def digest(reference: str) -> str:
    """Returns a fingerprint of the source that the reference names, see `read_sources`; else the
    reference."""
    sources = read_sources(split(reference)[0])
    return fingerprint(*sources.values()) if sources else reference


def _as_module(place: str) -> tuple[str, str]:
    """Returns (place, module name): for a file its absolute path, and the name it is imported under."""
    if not place.endswith(".py"):
        return place, place
    path = Path(place).resolve()
    return str(path), f"user_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
