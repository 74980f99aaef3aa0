"""Users' files: how they get to other machines, how they are imported, and where in them something was
raised."""

import hashlib
import importlib.util
import os
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


class UnusableFile(ValueError):
    """The file was imported, and does not have what it is asked for."""


class ImportTimeout(RuntimeError):
    """The import did not end: nobody will ever have what the file defines."""

    def __init__(self, path: str, limit: float) -> None:
        super().__init__(
            f"{path}: its import in the engine took more than {limit:g} s.\nDoes it wait for something that "
            "is only there later? Do that where it is first used."
        )


@dataclass(frozen=True, slots=True)
class UserFiles:
    """Files of the machine where a run starts, for those where it samples: every engine shall have the same
    rewards."""

    contents: Mapping[str, bytes]
    """By path."""

    @classmethod
    def of(cls, *paths: str | None) -> Self:
        return cls({path: Path(path).read_bytes() for path in paths if path})

    def here(self, path: str) -> str:
        """`path`, or where this machine has another file there or none, a copy."""
        content, file = self.contents[path], Path(path)
        if file.is_file() and file.read_bytes() == content:
            return path
        copy = cache_folder() / "user_files" / hashlib.sha256(content).hexdigest()[:16] / file.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            with replacing(copy, shared=True) as beside:
                beside.write_bytes(content)
        return str(copy)


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


def import_problem(error: BaseException, path: str) -> str:
    """What is wrong with the file, on whose import `error` was raised, and what to do."""
    if isinstance(error, UnusableFile):
        return f"{path}: {error}"
    return f"{located(error, path)}\n{IMPORTED}"


def located(error: BaseException, path: str) -> str:
    """The file, the last of its lines that was running, and what was raised: one line."""
    file = os.path.abspath(path)  # as tracebacks have it
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    place = f"line {lines[-1]}: " if lines else ""
    return f"{path}: {place}{headline(error)}"


def headline(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
