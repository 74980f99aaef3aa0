"""Copies users' files to other machines, imports users' files and modules, and locates errors in them.

A reference names one of their objects: `folder/file.py:Name` or `package.module:Name`. In a bare
`folder/file.py` the object has the name that the flag documents.

A file imports modules beside it, and processes that it starts import the file, as with a script. But its
folder is the last one of `sys.path`, since a file named like a package must not replace the package.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import platform
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from openrlhf.errors import ErrorCode, RunError, UsageError
from openrlhf.files import cache_folder, replacing

IMPORT_DEADLINE = 1800.0
"""Seconds that an engine waits for the import of a user's file before the run ends."""

IMPORTED = (
    "Fix that line: the file is imported where the run starts and in every engine. Put a module of yours "
    "beside it, or its folder into PYTHONPATH. Import inside a function what is only where engines run."
)
NOT_FOUND = (
    "Install the package on every machine, or add its folder to PYTHONPATH, or name a file: "
    "folder/file.py:{}."
)


class UnusableFile(UsageError):
    """Raised for a user's file or module that cannot be imported, or lacks the object that a flag needs. The
    caller names the flag and its value."""

    def __init__(self, text: str) -> None:
        super().__init__(ErrorCode.USER_CODE, text)
        self.args = (text,)  # pickle creates a copy with this argument


class ImportTimeout(RunError):
    """Raised for a user's file whose import in an engine did not end within its limit."""

    def __init__(self, path: str, limit: float) -> None:
        text = (
            f"its import in the engine took more than {limit:g} s.\nDoes it wait for something that "
            "is only there later? Do that where it is first used."
        )
        super().__init__(ErrorCode.USER_CODE, text, value=path)
        self.args = (path, limit)  # pickle creates a copy with these arguments


class OtherModule(RunError):
    """Raised on a machine that lacks a module, or has another version than the machine where the run
    starts."""


@dataclass(frozen=True, slots=True)
class UserFiles:
    """Users' files of the machine where a run starts, for the machines of its engines, so that all have the
    same rewards. A file is copied; a module is only compared, because it may need the rest of its package."""

    contents: Mapping[str, Mapping[str, bytes]]
    """File or module -> the sources that `read_sources` returns."""

    @classmethod
    def of(cls, *references: str | None) -> Self:
        found = {place: read_sources(place) for place, _ in map(split, filter(None, references))}
        return cls({place: sources for place, sources in found.items() if sources})

    def here(self, reference: str) -> str:
        """Returns `reference`, or a reference to a copy if this machine lacks the file or has another one
        there.

        Raises OtherModule for a module that differs or is missing here.
        """
        place, name = split(reference)
        if place not in self.contents:  # a module without a source file is known by name only
            return reference
        contents, source = self.contents[place], find_source(place)
        if source and os.path.isfile(source) and read_sources(place) == contents:
            return reference
        if not place.endswith(".py"):
            problem = f"{source} is not the same" if source else "it is not found"
            raise OtherModule(
                ErrorCode.USER_CODE,
                f"on {platform.node()} {problem}.\nInstall the same package on every machine, or name a "
                f"file, which is copied: folder/file.py:{name}.",
                value=reference,
            )
        folder = cache_folder() / "user_files" / fingerprint(*contents.values())
        for copy, content in ((folder / path, content) for path, content in contents.items()):
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                with replacing(copy, shared=True) as beside:
                    beside.write_bytes(content)
        return ":".join(filter(None, (str(folder / Path(place).name), name)))


def read_sources(place: str) -> dict[str, bytes]:
    """Returns the sources of a file and of what it imports from its folder, or of a module, by path."""
    source = find_source(place)
    if source is None:
        return {}
    own, beside = Path(source).resolve(), _beside(source).values() if place.endswith(".py") else ()
    files = [file for module in beside for file in _files(module)]
    found = {str(file.relative_to(own.parent)): file.read_bytes() for file in files}
    return {Path(source).name: own.read_bytes(), **found}


def _beside(path: str) -> dict[str, Path]:
    """Returns the modules in a file's folder that it imports, directly or through one of them, by name; of a
    package without an __init__.py the folder."""
    own, found = Path(path).resolve(), {}
    read, known = [own], {own.stem, "openrlhf", *sys.stdlib_module_names}
    for file in read:
        for name in sorted(_imported(file).difference(found, known)):
            folder = own.parent / name
            files = (folder / "__init__.py", own.with_name(f"{name}.py"))
            module = next(filter(Path.is_file, files), folder)
            if module is not folder or (folder.is_dir() and not find_source(name)):
                found[name] = module
                read += _files(module)
    return found


def _files(module: Path) -> list[Path]:
    folder = module.parent if module.name == "__init__.py" else module
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [module]


def _imported(file: Path) -> set[str]:
    """Returns the first parts of the names of modules that a file imports, also inside functions."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # the import tells of it
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def imports(place: str, package: str) -> bool:
    """Tells whether the source of a file or module imports the package."""
    source = find_source(place)
    return source is not None and package in _imported(Path(source))


def fingerprint(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def split(reference: str) -> tuple[str, str]:
    """Returns (file or module, name); the name is "" for a bare file."""
    place, colon, name = reference.rpartition(":")
    return (place, name) if colon else (reference, "")


def resolved(reference: str) -> str:
    """Returns the reference with the absolute path of its file, valid from any folder."""
    place, name = split(reference)
    if not place.endswith(".py"):
        return reference
    return ":".join(filter(None, (str(Path(place).resolve()), name)))


def find_source(place: str) -> str | None:
    """Returns the path of a file or module; None for a module that is not found or has no source."""
    if place.endswith(".py"):
        return place
    try:
        spec = importlib.util.find_spec(place)  # imports the module's parent packages
    except (ModuleNotFoundError, ValueError):  # ValueError: without a spec, such as __main__
        return None
    return spec.origin if spec and spec.has_location else None


def import_place(place: str, name: str) -> ModuleType:
    """Imports a module, or a file as the module `name`. Exceptions of the import pass through."""
    return import_file(place, name) if place.endswith(".py") else importlib.import_module(place)


def is_importing() -> bool:
    """Tells whether the caller is part of the import of a user's file."""
    return any(frame.f_code is import_place.__code__ for frame, _ in traceback.walk_stack(None))


def import_file(path: str, name: str) -> ModuleType:
    """Imports a file, registered in `sys.modules` under its own name; as `name` if that is another module's.
    Raises UnusableFile if another module is found instead of one beside it. Other exceptions pass through."""
    folder, stem = os.path.dirname(os.path.realpath(path)), Path(path).stem
    if folder not in map(os.path.realpath, sys.path):
        sys.path.append(folder)
    importlib.invalidate_caches()
    contents = lambda files: [file.read_bytes() for file in files]
    for module, own in _beside(path).items():
        if (origin := _origin(module)) and contents(_files(Path(origin))) != contents(_files(own)):
            problem = f"it imports {module}, which is beside it ({own}) and at {origin}"
            raise UnusableFile(f"{problem}.\nRename the one beside it.")
    if _origin(stem) == os.path.realpath(path):
        name = stem
    module = _empty_module(os.path.abspath(path), name)
    sys.modules[name] = module  # dataclasses and pickle look the module up
    return _run(module)


def _origin(name: str) -> str | None:
    """Returns the path of the file from which `import name` takes its module; None without one."""
    source = None if "." in name else find_source(name)
    return source and os.path.realpath(source)


def run_file(path: str, name: str) -> ModuleType:
    """Runs a file as a new module that is not registered, beside the one that was imported."""
    return _run(_empty_module(path, name))


def _empty_module(path: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # every .py file has one
    return importlib.util.module_from_spec(spec)


def _run(module: ModuleType) -> ModuleType:
    assert module.__spec__ is not None and module.__spec__.loader is not None  # every .py file has both
    module.__spec__.loader.exec_module(module)
    return module


def call_problem(function: Any, name: str, *takes: str) -> str:
    """Returns the reason why `function` cannot be called with positional arguments of the names `takes`, or
    has one of the names at another place; "" if it can, or if it has no signature, as some compiled
    functions."""
    if not callable(function):
        return f"{name} is a {type(function).__name__}, and no function"
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ""
    try:
        signature.bind(*takes)
    except TypeError as error:
        return f"{name}{signature} cannot be called as {name}({', '.join(takes)}): {error}"
    for own, given in zip(signature.parameters, takes, strict=False):
        if own in takes and own != given:
            called = f"is called as {name}({', '.join(takes)})"
            return f"{name}{signature} {called}: its {own} would be the {given}; put them into this order"
    return ""


def import_problem(error: BaseException, reference: str) -> str:
    """Returns a message for `error`, raised by the import of a file or module: the reference, the problem and
    the remedy."""
    return f"{reference}: {import_remedy(error, reference)}"


def import_remedy(error: BaseException, reference: str) -> str:
    """Returns the problem and the remedy, for callers that name the reference themselves."""
    place, name = split(reference)
    if isinstance(error, UnusableFile):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
        return f"{headline(error)}.\n{NOT_FOUND.format(name or 'NAME')}"
    return f"{line_and_error(error, reference)}\n{IMPORTED}"


def located(error: BaseException, reference: str) -> str:
    """Returns one line: the reference, the line of its file that raised or led to the error, and the
    error."""
    return f"{reference}: {line_and_error(error, reference)}"


def line_and_error(error: BaseException, reference: str) -> str:
    """Returns the line of the reference's file that raised or led to the error, and the error."""
    source = find_source(split(reference)[0]) or ""
    files = os.path.abspath(source), os.path.realpath(source)  # the forms in tracebacks
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if isinstance(error, SyntaxError) and error.filename in files:
        lines = [error.lineno]
    place = f"line {lines[-1]}: " if lines else ""
    return f"{place}{headline(error)}"


def headline(error: BaseException) -> str:
    """Returns the first line of an error, with its type unless the error is one of ours with a code."""
    kind = "" if type(error) in (RunError, UsageError) else f"{type(error).__name__}: "
    return f"{kind}{error}".partition("\n")[0]


@contextmanager
def program_hidden() -> Iterator[None]:
    """Hides the program of this process inside the block. multiprocessing would run it in each process that
    it spawns, too: a user's loop without `if __name__ == "__main__"` would begin again there."""
    with _HIDING:
        main = vars(sys.modules["__main__"])
        shown = {name: main[name] for name in ("__file__", "__spec__") if name in main}
        main["__spec__"] = None
        main.pop("__file__", None)  # as in an interactive session
        try:
            yield
        finally:
            main.update(shown)


_HIDING = threading.Lock()
