"""Writes files atomically, checks folders that machines share, and locates the user's cache folder."""

import errno
import json
import os
import platform
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from openrlhf.errors import ErrorCode, RunError, UsageError, first_line
from openrlhf.faults import fault


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yields a temporary path beside `path`. The file or folder created there replaces `path` when the block
    ends: readers see either the old or the new one, even if this process or the machine dies. After an error
    the old one stays, and the temporary one is removed. A folder cannot replace an existing folder.

    `shared`: other processes may write the same path at the same time."""
    owner = f".{platform.node()}.{os.getpid()}" if shared else ""
    beside = path.with_name(f".{path.name}{owner}.tmp")
    _remove(beside)  # left by a process that was killed
    try:
        yield beside
        _flush(beside)
        beside.replace(path)
        sync_folder(path.parent)
    finally:
        _remove(beside)


def write_atomically(path: Path, parts: Iterable[str], *, shared: bool = False) -> None:
    """Writes UTF-8 text, see `replacing`."""
    with replacing(path, shared=shared) as beside, beside.open("w", encoding="utf-8") as file:
        file.writelines(parts)


def unwaiting(path: str, flags: int) -> int:
    """Opens a file for `open(opener=...)`: a FIFO that nobody writes to at once, instead of never."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_small(file: Path, largest: int = 64 << 20) -> bytes:
    """Returns a regular file's content of up to `largest` bytes. Raises ValueError with name and reason."""
    try:
        with open(file, "rb", opener=unwaiting) as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise ValueError(f"{file.name} is unreadable: it is no regular file")
            content = opened.read(largest + 1)
    except FileNotFoundError as error:
        raise ValueError(f"{file.name} is missing") from error
    except OSError as error:
        raise ValueError(f"{file.name} is unreadable: {error.strerror}") from error
    if len(content) > largest:
        raise ValueError(f"{file.name} is unreadable: it has more than {largest:,} bytes")
    return content


def read_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a small file. Raises ValueError, like `read_small`, for any other content."""
    content = read_small(file)
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(content), dict):
            return found
    raise ValueError(f"{file.name} is unreadable: it holds no JSON object")


MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors*", "pytorch_model*.bin*")
MODEL_FILES += ("adapter_config.json", "adapter_model.*")
"""Patterns of the files that transformers writes for a model, and peft for an adapter."""
READER_FILES = ("tokenizer*.json", "tokenizer.model", "*piece*.model", "tekken.json", "vocab.*", "merges.txt")
READER_FILES += ("special_tokens_map.json", "added_tokens.json", "chat_template.*", "*processor_config.json")
READER_FILES += ("additional_chat_templates/*.jinja", "reward_statistics.json")
"""Patterns of the files beside a model that say how it is used."""


def holds_model(folder: str | os.PathLike) -> bool:
    """Tells whether a folder has files of a model or an adapter."""
    return os.path.isdir(folder) and any(any(Path(folder).glob(pattern)) for pattern in MODEL_FILES)


EXPORT = ".export"
"""Folder in which a model is written before its files move to the folder around it."""


@contextmanager
def exporting(folder: str | os.PathLike) -> Iterator[Path]:
    """Yields an empty folder for the files of a model. When the block ends, they replace the model in
    `folder`, configurations last. If it raises, that one is unchanged. Raises RunError if files cannot be
    written; weights that were written stay in a folder of their own unless the disk refused."""
    place, made, kept = Path(folder), Path(folder) / EXPORT, Path(folder) / "unfinished_export"
    try:
        _remove(made)  # left by a process that was killed
        made.mkdir(parents=True)
        yield made
        for file in (path for path in made.rglob("*") if path.is_file()):
            file.chmod(made.stat().st_mode & 0o666)  # as the umask says: safetensors shuts others out
        _flush(made)
        fault("export.before_move")
        of_before = (*MODEL_FILES, *READER_FILES) if holds_model(place) else ()
        for file in [file for pattern in of_before for file in place.glob(pattern)]:
            if not (made / file.relative_to(place)).exists():
                file.unlink()
        for path in sorted(made.iterdir(), key=lambda path: path.name.endswith("config.json")):
            if path.is_dir():
                _remove(place / path.name)
            path.replace(place / path.name)
        sync_folder(place)
    except Exception as error:
        if not isinstance(error, OSError) and "I/O error" not in str(error):  # safetensors has its own class
            if not any(made.glob("*.safetensors")):
                raise
            _remove(kept)
            made.replace(kept)
            text = (
                f"the model could not be saved completely: {type(error).__name__}: {first_line(error)}\n"
                f"Its weights are in {kept}: copy what is missing there from the model that was trained."
            )
            raise RunError(ErrorCode.NOT_WRITABLE, text) from error
        reason = getattr(error, "strerror", None) or str(error)
        raise not_written(place, reason) from error
    finally:
        _remove(made)


def not_written(place: str | os.PathLike, reason: str) -> RunError:
    """Returns the error of a save that the disk refused."""
    text = (
        f"{place} could not be written: {reason}.\nEarlier checkpoints are intact. Free space or change "
        "permissions there, and resume with --ckpt.load_enable."
    )
    return RunError(ErrorCode.NOT_WRITABLE, text)


def check_owner(folder: str | os.PathLike, flag: str) -> None:
    """Raises UsageError if a folder belongs to another user: its files are unpickled, and a pickle can run
    any code. Folders of root are trusted, and root may read all folders."""
    owner, me = os.stat(folder).st_uid, os.geteuid()
    if owner not in (me, 0) and me != 0:
        text = (
            f"the folder belongs to another user (number {owner}), and a checkpoint can run code when it is "
            f"read.\nIf you trust the user, copy the folder (`cp -r {folder} COPY`) and name the copy."
        )
        raise UsageError(ErrorCode.UNREADABLE, text, flag=flag, value=folder)


def nearest(folder: str | os.PathLike) -> Path:
    """Returns `folder`, or the nearest folder above it that exists."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    return place


PROBE_BYTES = 1 << 20
"""Bytes that are written to find out whether a folder can be written to."""


def unwritable(folder: str | os.PathLike) -> str | None:
    """Returns the reason why no file can be written to `folder`, or to the nearest folder above it that
    exists; None if one can."""
    try:
        os.fsencode(folder)
        with tempfile.NamedTemporaryFile(dir=nearest(folder)) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeEncodeError:
        return "no file can have this name"
    return None


LONGEST_PATH = 28
"""Maximum bytes of the path of a folder for sockets, whose addresses have at most 107."""


@cache
def socket_folder() -> str:
    """Returns a folder with a short path that can be written to. Raises UsageError if there is none."""
    named = [os.environ[name] for name in ("TMPDIR", "XDG_RUNTIME_DIR") if os.environ.get(name)]
    places = (*named, "/tmp", "/var/tmp", "/dev/shm")
    for place in (place for place in places if len(os.fsencode(place)) <= LONGEST_PATH):
        if os.path.isdir(place) and not unwritable(place):
            return place
    text = (
        f"sockets need a folder with a path of at most {LONGEST_PATH} bytes, and none of "
        f"{', '.join(places)} has one and can be written to.\nSet TMPDIR to such a folder."
    )
    raise UsageError(ErrorCode.NOT_WRITABLE, text, flag="TMPDIR", value=os.environ.get("TMPDIR", ""))


PATIENCE = 5.0
"""Seconds within which a network file system shows one machine's new files on another."""


@contextmanager
def marked(folder: str | os.PathLike) -> Iterator[Path]:
    """Keeps an empty marker file in `folder` while the block runs, and yields its path: machines that see it
    share the folder with this one."""
    mark = Path(folder) / f".{platform.node()}.{uuid.uuid4().hex}.mark"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


def appears(path: str | os.PathLike) -> bool:
    """Tells whether a file or folder exists on this machine, or appears within PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not (found := os.path.exists(path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def cache_folder() -> Path:
    return Path(os.environ.get("OPENRLHF_CACHE") or "~/.cache/openrlhf").expanduser()


@contextmanager
def writing_to_cache(
    complaint: str, *, flag: str = "", value: object = "", otherwise: str = ""
) -> Iterator[Path]:
    """Creates the cache folder and yields it. An OSError of the disk inside becomes a UsageError about `flag`
    and `value`, with `complaint`, the folder, the reason and the remedy; `otherwise`: another remedy to
    append."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        if error.errno is None:  # libraries raise it for a damaged file
            raise
        raise UsageError(
            ErrorCode.NOT_WRITABLE,
            f"{complaint} {folder}: {error.strerror}.\n"
            f"Set OPENRLHF_CACHE to a folder with space that you may write to{otherwise}.",
            flag=flag,
            value=value,
        ) from error


def _flush(path: Path) -> None:
    """Syncs files and folders to the disk, because a rename may reach it before the renamed content."""
    inside = [path, *path.rglob("*")] if path.is_dir() else [path]
    for file in inside:
        if file.is_file():
            sync_file(file)
    for folder in inside:
        if folder.is_dir():
            sync_folder(folder)


def sync_file(file: Path) -> None:
    """Writes a file's content to the disk."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Writes a folder's entries to the disk: the names of its files, as they are after a rename."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # this file system cannot sync folders
            raise
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
