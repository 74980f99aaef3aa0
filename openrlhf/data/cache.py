"""Caches tokenised data on disk, keyed by a digest of its inputs.

The same files, tokenizer, options and code give the same entry. Every process of a machine maps the same
pages.

    <folder>/<key>/meta.json    the inputs, counts, and the layouts of the arrays
    <folder>/<key>/*.npy        the arrays

An entry is written under a temporary name and renamed, so it is complete or absent. The process that takes
the entry's lock first builds it; the others wait and read it.
"""

import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from filelock import BaseFileLock, FileLock, Timeout

from openrlhf.errors import ErrorCode, UsageError, is_first_of_machine, notify
from openrlhf.files import cache_folder, replacing
from openrlhf.observability.waits import tracked
from openrlhf.text import Calendar, first_token_ids

if TYPE_CHECKING:  # columns are checked before anything heavy is imported
    from transformers import PreTrainedTokenizerBase

    from openrlhf.data.store import Samples

logger = logging.getLogger(__name__)


DatasetT = TypeVar("DatasetT", bound="Samples")


def cached(
    dataset_type: type[DatasetT],
    key_parts: Mapping[str, object],
    build: Callable[[], DatasetT],
    *,
    cache_dir: str | None = None,
    source: str = "",
) -> DatasetT:
    """Returns the dataset from the cache, or the result of `build`, which it then keeps.

    key_parts: everything that the result depends on, as JSON: see `rows_digest` and `tokenizer_digest`.
    cache_dir: None: `datasets` in `cache_folder()`.
    source: where the rows come from, for people who look at an entry.

    A damaged entry is built again, with a warning. Raises UsageError when `cache_dir` cannot be written; with
    the default folder it only warns and keeps nothing.
    """
    folder = cache_folder() / "datasets" if cache_dir is None else Path(cache_dir).expanduser()
    entry = folder / digest({**key_parts, "kind": dataset_type.__name__, "versions": _versions()})
    if isinstance(kept := _read(dataset_type, entry), dataset_type):
        return kept
    if not is_first_of_machine():
        time.sleep(HEAD_START)  # so that the process that shows its progress is the one that builds
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(entry)
    except (OSError, NotImplementedError) as error:
        _refuse(folder, cache_dir, error)
        return build()
    try:
        kept = _read(dataset_type, entry)
        if isinstance(kept, dataset_type):
            return kept
        if entry.exists():
            logger.warning("%s: damaged (%s); building it again", entry, kept)
        return _keep(build(), dataset_type, entry, key_parts, source)
    finally:
        lock.release()


HEAD_START = 1.0
"""Seconds that other processes wait before they try the lock."""


def digest(value: object) -> str:
    """Returns the SHA-256 of a JSON-serialisable value, as hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def arrays_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of the arrays' names, layouts and contents, as hex."""
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(json.dumps([name, _layout(array)]).encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's content, as hex."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(_MEBIBYTE), b"")
        for block in tracked(blocks, -(-path.stat().st_size // _MEBIBYTE), f"checksum of {path.name}, MiB"):
            found.update(block)
    return found.hexdigest()


def sampled_digest(path: Path) -> str:
    """Returns a digest of a file's size and 64 sampled blocks: cheap, and changes whenever weights were
    trained."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for place in range(64):
            file.seek(place * max(0, size - _PLACE) // 63)
            found.update(file.read(_PLACE))
    return found.hexdigest()


_MEBIBYTE = 2**20
_PLACE = 2**14
"""Bytes of a sampled block."""


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns a digest of everything that turns messages into tokens. It changes daily for a chat template
    that writes the date."""
    template = tokenizer.chat_template
    return digest(
        {
            "class": type(tokenizer).__name__,
            "vocabulary": _vocabulary(tokenizer),
            "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "first_tokens": first_token_ids(tokenizer),
            "chat_template": template,
            "today": str(Calendar.today) if "strftime_now" in str(template) else None,
        }
    )


def _vocabulary(tokenizer: "PreTrainedTokenizerBase") -> object:
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # truncation and padding are state of the last call, not of the tokenizer
        return state | {"truncation": None, "padding": None}
    with tempfile.TemporaryDirectory() as folder:
        try:
            files = tokenizer.save_vocabulary(folder) or ()
        except NotImplementedError:
            files = ()
        return [tokenizer.get_vocab(), [file_digest(Path(file)) for file in files]]


@cache
def _versions() -> Mapping[str, str]:
    """Returns digests and versions of the code that turns rows into tokens."""
    here = Path(__file__).parent
    others = (here.parent / name for name in ("text.py", "types.py"))
    code = [path.read_text(encoding="utf-8") for path in [*sorted(here.glob("*.py")), *others]]
    return {
        "code": digest(code),
        "tokenizers": version("tokenizers"),
        "transformers": version("transformers"),
    }


def _read(dataset_type: type[DatasetT], entry: Path) -> DatasetT | Exception:
    """Returns the dataset, or the error that reading it raised."""
    try:
        dataset = _load(dataset_type, entry)
    except (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError) as damage:
        return damage
    notify(f"tokenised data read from the cache {entry}")
    return dataset


def _load(dataset_type: type[DatasetT], entry: Path) -> DatasetT:
    about = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
    arrays = {
        name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in about["arrays"]
    }
    for name, array in arrays.items():
        if _layout(array) != about["arrays"][name]:
            raise ValueError(f"{name}.npy holds {_layout(array)}, not {about['arrays'][name]}")
    return dataset_type.from_arrays(arrays, about["meta"])


def _layout(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": list(array.shape)}


def _keep(
    dataset: DatasetT,
    dataset_type: type[DatasetT],
    entry: Path,
    key_parts: Mapping[str, object],
    source: str,
) -> DatasetT:
    """Writes the dataset to its entry and returns it as memory-mapped; returns it unchanged where writing
    fails."""
    arrays = dataset.arrays()
    about = {
        "source": source,
        "kind": dataset_type.__name__,
        "made_of": {**key_parts, "versions": _versions()},
        "meta": dataset.meta(),
        "arrays": {name: _layout(array) for name, array in arrays.items()},
    }
    try:
        if entry.exists():
            shutil.rmtree(entry)
        with replacing(entry) as beside:
            beside.mkdir()
            for name, array in arrays.items():
                np.save(beside / f"{name}.npy", array)
            (beside / "meta.json").write_text(json.dumps(about, indent=1))
    except OSError as error:
        logger.warning("%s: tokenised data cannot be kept: %s\n%s", entry, error.strerror or error, _REMEDY)
        return dataset
    notify(f"tokenised data kept in {entry}")
    return _load(dataset_type, entry)


def _lock(entry: Path) -> BaseFileLock:
    """Acquires the entry's file lock; the operating system releases it when the process dies."""
    lock = FileLock(entry.with_name(f"{entry.name}.lock"))
    try:
        lock.acquire(timeout=_PATIENCE)
    except Timeout:
        notify(f"waiting for another process, which tokenises the same rows into {entry}")
        lock.acquire()  # bounded: the system frees it when its owner dies
    return lock


_PATIENCE = 5.0
"""Seconds to wait for the lock before a message says so."""

_REMEDY = "Name a folder that can be written with --data.cache_dir, or switch it off: --data.no_cache_enable"


def _refuse(folder: Path, cache_dir: str | None, error: Exception) -> None:
    """Raises UsageError when the user named this folder, otherwise warns."""
    reason = getattr(error, "strerror", None) or str(error)
    if cache_dir is not None:
        text = f"tokenised data cannot be kept in {folder}: {reason}.\n{_REMEDY}"
        raise UsageError(ErrorCode.NOT_WRITABLE, text, flag="--data.cache_dir", value=cache_dir) from error
    logger.warning("%s: tokenised data cannot be kept there: %s.\n%s", folder, reason, _REMEDY)
