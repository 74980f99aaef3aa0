"""Users' files and modules: how they get to other machines, how they are imported, and where in them
something was raised.

A reference names one of their objects: `folder/file.py:Name` or `package.module:Name`. In a bare
`folder/file.py` the object has the name that the flag documents.
"""

import hashlib
import importlib
import importlib.util
import os
import platform
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Self

from openrlhf.files import cache_folder, replacing

IMPORT_DEADLINE = 1800.0
"""Seconds that an engine waits for the import of a user's file. Then the run ends."""

IMPORTED = (
    "Fix that line: the file is imported where the run starts and in every engine. What is only there where "
    "engines run can be imported inside the function that uses it."
)
NOT_FOUND = (
    "Install the package on every machine, or add its folder to PYTHONPATH, or name a file: "
    "folder/file.py:{}."
)


class UnusableFile(ValueError):
    """The file was imported, and does not have what it is asked for."""


class ImportTimeout(RuntimeError):
    """The import did not end: nobody will ever have what the file defines."""

    def __init__(self, path: str, limit: float) -> None:
        super().__init__(
            f"{path}: its import in the engine took more than {limit:g} s.\nDoes it wait for something that "
            "is only there later? Do that where it is first used."
        )


class OtherModule(RuntimeError):
    """A machine has another version of a module than the one where the run starts, or has it not."""


@dataclass(frozen=True, slots=True)
class UserFiles:
    """Files of the machine where a run starts, for those where it samples: every engine shall have the same
    rewards. A file is copied; a module is only compared, because it may need the rest of its package."""

    contents: Mapping[str, bytes]
    """Maps files and modules to what they hold."""

    @classmethod
    def of(cls, *references: str | None) -> Self:
        sources = {place: source_of(place) for place, _ in map(split, filter(None, references))}
        return cls({place: Path(source).read_bytes() for place, source in sources.items() if source})

    def here(self, reference: str) -> str:
        """Returns `reference`, or where this machine has another file there or none, one to a copy.

        Raises OtherModule for a module that is not the same here.
        """
        place, name = split(reference)
        if place not in self.contents:  # a module without a source: only its name is known
            return reference
        content, source = self.contents[place], source_of(place)
        if source and os.path.isfile(source) and Path(source).read_bytes() == content:
            return reference
        if not place.endswith(".py"):
            problem = f"{source} is not the same" if source else "it is not found"
            raise OtherModule(
                f"{reference}: on {platform.node()} {problem}.\nInstall the "
                f"same package on every machine, or name a file, which is copied: folder/file.py:{name}."
            )
        copy = cache_folder() / "user_files" / hashlib.sha256(content).hexdigest()[:16] / Path(place).name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            with replacing(copy, shared=True) as beside:
                beside.write_bytes(content)
        return ":".join(filter(None, (str(copy), name)))


def split(reference: str) -> tuple[str, str]:
    """Returns the file or module and the name; "" for the name where the reference is a bare file."""
    place, colon, name = reference.rpartition(":")
    return (place, name) if colon else (reference, "")


def resolved(reference: str) -> str:
    """Returns the reference with the whole path of its file, which means the same in any folder."""
    place, name = split(reference)
    if not place.endswith(".py"):
        return reference
    return ":".join(filter(None, (str(Path(place).resolve()), name)))


def source_of(place: str) -> str | None:
    """Returns the path of a file or module; None for a module that is not found or has no source."""
    if place.endswith(".py"):
        return place
    try:
        spec = importlib.util.find_spec(place)  # imports the packages that the module is in
    except ModuleNotFoundError:
        return None
    return spec.origin if spec and spec.has_location else None


def import_place(place: str, name: str) -> ModuleType:
    """Imports a module, or a file as the module `name`. Raises what it raises."""
    return import_file(place, name) if place.endswith(".py") else importlib.import_module(place)


def import_file(path: str, name: str) -> ModuleType:
    """The file as the module `name`, or what it raises."""
    module = _empty_module(path, name)
    sys.modules[name] = module  # dataclasses and pickle look it up
    return _run(module)


def run_file(path: str, name: str) -> ModuleType:
    """The file once more, as a module of its own beside the one that was imported."""
    return _run(_empty_module(path, name))


def _empty_module(path: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # as of every .py file
    return importlib.util.module_from_spec(spec)


def _run(module: ModuleType) -> ModuleType:
    assert module.__spec__ is not None and module.__spec__.loader is not None  # as of every .py file
    module.__spec__.loader.exec_module(module)
    return module


def import_problem(error: BaseException, reference: str) -> str:
    """Says what is wrong with the file or module on whose import `error` was raised, and what to do."""
    place, name = split(reference)
    if isinstance(error, UnusableFile):
        return f"{reference}: {error}"
    if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
        return f"{reference}: {headline(error)}.\n{NOT_FOUND.format(name or 'NAME')}"
    return f"{located(error, reference)}\n{IMPORTED}"


def located(error: BaseException, reference: str) -> str:
    """Returns one line: the reference, the last line of its file that was running, and what was raised."""
    source = source_of(split(reference)[0]) or ""
    files = os.path.abspath(source), os.path.realpath(source)  # as tracebacks have it
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if isinstance(error, SyntaxError) and error.filename in files:
        lines = [error.lineno]
    place = f"line {lines[-1]}: " if lines else ""
    return f"{reference}: {place}{headline(error)}"


def headline(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
