"""Files that a reader sees whole or not at all, folders that machines share, and the user's cache folder."""

import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """A free path beside `path`. The file or folder that is made there takes the place of `path` when the
    block ends: a reader sees the old one or the new one, even if this process or the machine dies. After an
    error the old one stays, and nothing is left beside it. A folder does not replace another one.

    shared: other processes may write the same path at the same time."""
    owner = f".{platform.node()}.{os.getpid()}" if shared else ""
    beside = path.with_name(f".{path.name}{owner}.tmp")
    _remove(beside)  # of a process that was killed
    try:
        yield beside
        _flush(beside)
        beside.replace(path)
    finally:
        _remove(beside)


def write_atomically(path: Path, parts: Iterable[str], *, shared: bool = False) -> None:
    """UTF-8 text, see `replacing`."""
    with replacing(path, shared=shared) as beside, beside.open("w", encoding="utf-8") as file:
        file.writelines(parts)


MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors*", "pytorch_model*.bin*")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.*")
"""Of a model and of an adapter, as transformers and peft write them."""


def holds_model(folder: str | os.PathLike) -> bool:
    """A model or an adapter."""
    return any(any(Path(folder).glob(pattern)) for pattern in (*MODEL_FILES, *ADAPTER_FILES))


def clear_for_model(folder: str | os.PathLike, *, adapter: bool) -> None:
    """Before a model, or an adapter, is written over another one: what would be left of one of the other kind
    is removed, since loaders would take it for a part of the new one."""
    for pattern in MODEL_FILES if adapter else ADAPTER_FILES:
        for file in Path(folder).glob(pattern):
            file.unlink()


PATIENCE = 5.0
"""Seconds after which a network file system shows on one machine what another has made."""


@contextmanager
def marked(folder: str | os.PathLike) -> Iterator[Path]:
    """An empty file in `folder` while the block runs: machines that see it share the folder with this one."""
    mark = Path(folder) / f".{platform.node()}.{uuid.uuid4().hex}.mark"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


def appears(path: str | os.PathLike) -> bool:
    """Whether there is such a file or folder on this machine, or will be in a moment."""
    deadline = time.monotonic() + PATIENCE
    while not (found := os.path.exists(path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def cache_folder() -> Path:
    return Path(os.environ.get("OPENRLHF_CACHE") or "~/.cache/openrlhf").expanduser()


@contextmanager
def writing_to_cache(complaint: str, otherwise: str = "") -> Iterator[Path]:
    """The cache folder, which exists while the block runs. What the disk refuses there is a ValueError of the
    `complaint`, the folder, the reason and the remedy; `otherwise`: another remedy."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        if error.errno is None:  # a library's word for a damaged file
            raise
        raise ValueError(
            f"{complaint} {folder}: {error.strerror}.\n"
            f"Set OPENRLHF_CACHE to a folder with space that you may write to{otherwise}."
        ) from error


def made_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """`folder`, which `fill` fills where it is not there yet. One process of the machine does, the others
    wait."""
    from filelock import FileLock

    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.exists():
                with replacing(folder) as beside:
                    beside.mkdir()
                    fill(beside)
    return folder


def _flush(path: Path) -> None:
    """Onto the disk: a rename may get there before what it names."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
