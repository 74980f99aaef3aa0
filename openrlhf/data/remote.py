"""Fetches files at URLs once into the cache folder, from where they are read as local files.

    <cache folder>/downloads/<URL>/listing.json      the files that the URL named when it was last looked up
    <cache folder>/downloads/<URL>/<version>/...     their content, once for each version

Supports every address that fsspec has a file system for: s3://, gs://, hf://, https:// and others. A copy is
written under a temporary name and renamed, so it is complete or absent. It holds one version of the file
(ETag, time of change, size): when the file changes, another copy is made, and processes that read the earlier
one go on with it.
"""

import errno
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import aiohttp
import fsspec
from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from openrlhf.data.cache import digest
from openrlhf.data.files import ENDINGS, File, has_rows
from openrlhf.data.once import made_once
from openrlhf.errors import ErrorCode, UsageError, first_line, notify
from openrlhf.files import cache_folder, write_atomically, writing_to_cache
from openrlhf.observability.waits import tracked

ResultT = TypeVar("ResultT")

WAITS = (1.0, 4.0, 15.0)
"""Seconds before the second try, the third, ..."""

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}

VERSION_KEYS = {
    *("etag", "content-md5", "md5hash", "checksum", "blob_id", "generation"),
    *("last-modified", "lastmodified", "last_modified", "mtime", "modified", "updated", "created"),
}
"""Keys, in lower case, under which file systems report a value that changes with the file."""


def is_url(item: str) -> bool:
    return "://" in item


def is_saved_dataset(names: Iterable[str]) -> bool:
    """Returns whether a folder with these files was written by `save_to_disk`."""
    found = set(names)
    return {"state.json", "dataset_info.json"} <= found or "dataset_dict.json" in found


def fetched(url: str, flag: str, choose: Callable[[Sequence[str]], Sequence[str]]) -> list[File]:
    """Fetches the file at `url`; for a folder, the files that `choose` selects by name, or the folder itself
    where it is a saved dataset. `URL@data_dir` is a folder inside. A process looks up each URL once and keeps
    the listing.

    Raises UsageError if there is nothing, or where it cannot be fetched. Without a connection the copy
    fetched before is read, with a note.
    """
    listing = _listing(url, flag)
    place, files = listing.url, listing.files
    if not listing.is_folder:
        ((name, file),) = files.items()
        return [File(_copy(place, {name: file}, flag) / name, place, flag)]
    if is_saved_dataset(files):
        return [File(_copy(place, files, flag), place, flag)]
    return [
        File(_copy(f"{place}/{name}", {name: files[name]}, flag) / name, f"{place}/{name}", flag)
        for name in choose(sorted(files))
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Remote:
    path: str
    """Path within its file system."""
    version: str
    """Digest that differs once the file has changed, as far as its server tells."""
    size: int | None
    """Size in bytes, where the server reports it."""

    @classmethod
    def of(cls, path: str, info: Mapping[str, Any]) -> "_Remote":
        marks = sorted((key, str(value)) for key, value in info.items() if key.lower() in VERSION_KEYS)
        size = info.get("size")
        return cls(path=path, version=digest([marks, size])[:16], size=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Listing:
    """The files that a URL named when it was looked up."""

    url: str
    """The URL, including the data_dir."""
    is_folder: bool
    files: Mapping[str, _Remote]
    """Files by their names within the folder; a single file by its own name."""


@cache
def _listing(url: str, flag: str) -> _Listing:
    kept = _folder(url) / "listing.json"
    try:
        listing = _tried(partial(_look_up, url), flag, url)
    except _Unreachable as error:
        if not kept.exists():
            raise
        on = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.stat().st_mtime))
        notify(f"note: {error}\nReading the copy of {on} in {kept.parent}")
        fields = json.loads(kept.read_text(encoding="utf-8"))
        files = {name: _Remote(**file) for name, file in fields.pop("files").items()}
        return _Listing(**fields, files=files)
    with _writing(flag, url):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, [json.dumps(asdict(listing), indent=1)], shared=True)
    return listing


def _look_up(url: str) -> _Listing:
    """Looks up the files of a URL. Raises FileNotFoundError if there is nothing."""
    head, at, data_dir = url.rpartition("@")
    inside = f"{head.rstrip('/')}/{data_dir}"
    try:
        return _look_up_whole(url.rstrip("/"))
    except FileNotFoundError as error:
        if not at or not is_url(head) or _reason(error) is not error:
            raise
        return _look_up_whole(inside.rstrip("/"))


def _look_up_whole(url: str) -> _Listing:
    files, path = _open(url)
    name = PurePosixPath(urlsplit(url).path if _is_http(url) else path).name
    info = {"type": "file"} if _is_http(url) and not has_rows(name) else files.info(path)
    if info["type"] != "directory":
        if not has_rows(name):
            folders = " Folders cannot be listed over HTTP." if _is_http(url) else ""
            raise _Wrong(ErrorCode.UNSUPPORTED, f"a file must end in {ENDINGS}.{folders}")
        return _Listing(url=url, is_folder=False, files={name: _Remote.of(path, info)})
    root = PurePosixPath(str(files._strip_protocol(path)))
    found = cast(dict[str, dict[str, Any]], files.find(path, detail=True))
    inside = {
        str(PurePosixPath(name).relative_to(root)): _Remote.of(name, about)
        for name, about in found.items()
        if not name.endswith("/")  # some stores represent folders by empty objects
    }
    if outside := next((name for name in inside if ".." in PurePosixPath(name).parts), None):
        raise _Wrong(ErrorCode.UNREADABLE, f"it has a file whose name leads out of it: {outside}")
    return _Listing(url=url, is_folder=True, files=inside)


def _copy(url: str, files: Mapping[str, _Remote], flag: str) -> Path:
    """Returns a local folder with the content of the files."""
    version = digest([(name, file.version) for name, file in sorted(files.items())])[:16]

    def fill(folder: Path) -> None:
        for name, file in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _tried(partial(_fetch, url, file, target), flag, url)

    with _writing(flag, url):
        return made_once(_folder(url) / version, fill)


def _fetch(url: str, file: _Remote, target: Path) -> None:
    """Fetches a file, or what an interrupted try has not fetched of it."""
    files, _ = _open(url)
    shown = _Mebibytes(file.size, f"fetching {PurePosixPath(file.path).name}, MiB")
    try:
        if not _is_continued(files, file, target, shown):
            files.get_file(file.path, str(target), callback=shown)
    finally:
        shown.close()
    size = target.stat().st_size
    if file.size not in (None, size):
        raise OSError(f"received {size} of {file.size} bytes")


def _is_continued(files: fsspec.AbstractFileSystem, file: _Remote, target: Path, shown: "_Mebibytes") -> bool:
    """Appends to `target` what it lacks. Returns False, with nothing appended, if it is no beginning of the
    file or the server sends only whole files."""
    done = target.stat().st_size if target.exists() else 0
    if file.size is None or not 0 < done < file.size:
        return False
    if _Remote.of(file.path, files.info(file.path)).version != file.version:
        return False
    try:
        with files.open(file.path, "rb") as source, target.open("ab") as sink:
            source.seek(done)
            shown.relative_update(done)
            while part := cast(bytes, source.read(_MEBIBYTE)):
                sink.write(part)
                shown.relative_update(len(part))
    except (ValueError, NotImplementedError):  # fsspec, where a server ignores the wanted range
        return False
    return True


class _Mebibytes(Callback):
    """Shows the progress of a download."""

    def __init__(self, size: int | None, title: str) -> None:
        super().__init__()
        self._steps = tracked(repeat(None), None if size is None else -(-size // _MEBIBYTE), title)

    def relative_update(self, inc: int = 1) -> None:
        before, self.value = self.value, self.value + inc
        for _ in range(self.value // _MEBIBYTE - before // _MEBIBYTE):
            next(self._steps)

    def close(self) -> None:
        self._steps.close()


_MEBIBYTE = 2**20


def _open(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the URL's file system, with its listing cache cleared, and the path within it."""
    protocol = url.partition("://")[0]
    try:
        files, path = url_to_fs(url, **(_http_options() if _is_http(url) else {}))
    except ImportError as error:
        package = PACKAGES.get(protocol)
        text = f"needs the package {package}: pip install {package}" if package else str(error)
        raise _Wrong(ErrorCode.MISSING_PACKAGE, text) from error
    except ValueError as error:
        raise _Wrong(ErrorCode.UNSUPPORTED, str(error)) from error
    files.invalidate_cache()
    return files, path


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _http_options() -> dict[str, Any]:
    """Returns HTTP options without aiohttp's limit of five minutes for a download, and with the proxy of the
    environment."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def _folder(url: str) -> Path:
    """Returns the folder of everything cached for a URL."""
    return cache_folder() / "downloads" / digest(url)[:16]


def _writing(flag: str, url: str) -> AbstractContextManager[Path]:
    return writing_to_cache("it cannot be kept in", flag=flag, value=url)


class _Wrong(UsageError):
    """A non-retryable error."""


class _Unreachable(UsageError):
    """An error that remains after the last try."""


def _tried(action: Callable[[], ResultT], flag: str, url: str) -> ResultT:
    """Returns the result of `action`, tried up to four times."""
    for wait in (*WAITS, None):
        try:
            return action()
        except Exception as error:  # every file system has errors of its own
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise
            code, text, is_final = _explained(_reason(error))
            if is_final:
                raise UsageError(code, text, flag=flag, value=url) from error
            if wait is None:
                text = f"failed {len(WAITS) + 1} times: {text}"
                raise _Unreachable(code, text, flag=flag, value=url) from error
            notify(f"{flag} {url}: {text}; trying again in {wait:g} s")
            time.sleep(wait)
    raise AssertionError


def _reason(error: Exception) -> BaseException:
    """Returns the actual cause of an error: fsspec's HTTP file system raises FileNotFoundError for any
    failure and chains the cause."""
    status = getattr(error.__cause__, "status", None)
    if isinstance(error, FileNotFoundError) and isinstance(
        error.__cause__, aiohttp.ClientError | TimeoutError
    ):
        return error if status in (404, 410) else error.__cause__
    return error


def _explained(error: BaseException) -> tuple[ErrorCode, str, bool]:
    """Returns the code of an error, its text, and whether another try would fail too."""
    if isinstance(error, _Wrong):
        return error.code, error.text, True
    if isinstance(error, FileNotFoundError):
        return ErrorCode.NOT_FOUND, "there is no such file or folder.", True
    if isinstance(error, aiohttp.ClientResponseError):
        is_final = 400 <= error.status < 500 and error.status not in (408, 429)
        return ErrorCode.UNREADABLE, f"the server answers {error.status} {error.message}", is_final
    return ErrorCode.UNREADABLE, first_line(error), isinstance(error, PermissionError)
