"""Writes one rank's checkpoint files, and the hashes by which a reader checks them."""

import hashlib
import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist

from openrlhf.checkpoint.manifest import Entry, Manifest, why_unwritten
from openrlhf.faults import fault
from openrlhf.files import not_written

LARGE = 256 << 10
"""Number of bytes from which a write is hashed in a thread."""


class CheckpointWriter:
    """Writes this rank's files of a checkpoint. While a file is written, a thread computes its SHA-256, and
    other threads sync earlier ones to the disk.

    A failed write is recorded instead of raised, because other ranks would wait for this one in collectives.
    `finish` raises on all ranks.
    """

    def __init__(self, folder: str | Path, *, later: bool = False) -> None:
        """`later`: copies files to host memory, and writes them in a thread while the caller continues."""
        self.folder, self.later = Path(folder), later
        self._threads = ThreadPoolExecutor(1 if later else 2)
        self._entries: dict[str, Future[Entry]] = {}
        self._failure: tuple[str, str] | None = None

    @property
    def is_done(self) -> bool:
        """True if no file is waiting for the disk."""
        return all(entry.done() for entry in self._entries.values())

    def save(self, state: Any, path: str | Path) -> None:
        """Writes `state` with `torch.save`."""
        self.write(path, lambda file: torch.save(state, file))

    def write(self, path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
        """Adds the file `path`, whose content `write` writes."""

        def write_file() -> None:
            with self.opened(Path(path)) as file:
                write(file)

        self.attempt(path, write_file)

    @contextmanager
    def opened(self, path: Path) -> Iterator[IO[bytes]]:
        """Yields a stream for the content of the file `path`. The content must be written from the beginning
        to the end; when the block ends the file is added. Raises errors of writing."""
        file = HashedFile(path, later=self.later)
        stream = _Stream(file, 1 << 20)
        try:
            yield cast(IO[bytes], stream)
            stream.flush()
        except BaseException:
            file.close()
            raise
        self._entries[str(path.relative_to(self.folder))] = self._threads.submit(file.finish)

    def attempt(self, path: str | Path, write: Callable[[], object]) -> None:
        """Calls `write`, which writes to `path`, unless an earlier write failed."""
        if self._failure is None:
            try:
                write()
            except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
                self._fail(error, path)

    def finish(self) -> None:
        """Waits until the files of all ranks are on the disk, and writes the manifest. Collective. If any
        rank could not write, raises RunError on every rank."""
        files = {}
        for name, entry in self._entries.items():
            try:
                files[name] = entry.result()  # bounded: by the disk; `train.rank_timeout`
            except OSError as error:
                self._fail(error, self.folder / name)
        self._threads.shutdown()
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (files, self._failure))
        if failures := [failure for _, failure in found if failure]:
            raise not_written(*failures[0])
        if dist.get_rank() == 0:
            listed = {name: entry for part, _ in found for name, entry in part.items()}
            Manifest(files=listed).write(self.folder)

    def _fail(self, error: Exception, path: str | Path) -> None:
        self._failure = self._failure or (str(path), why_unwritten(error, self.folder))


class HashedFile(io.RawIOBase):
    """A file that is written once, from the beginning to the end, while a thread computes its SHA-256. Writes
    after an error or after `close` do nothing, because torch continues to write after an error."""

    def __init__(self, path: Path, *, later: bool) -> None:
        """`later`: keeps the content in host memory until `finish`."""
        self._path, self._later = path, later
        self._pieces: deque[bytes] = deque()
        self._hash, self._num_bytes = hashlib.sha256(), 0
        self._hashing = ThreadPoolExecutor(1)
        self._file = None if later else self._open()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._num_bytes

    def write(self, content: Any, /) -> int:
        view = memoryview(content).cast("B")
        self._num_bytes += len(view)
        if self._later:
            self._pieces.append(bytes(view))
        elif self._file is not None and not self._file.closed:
            self._put(self._file, view)
        return len(view)

    def finish(self) -> Entry:
        """Syncs the content to the disk, closes the file, and returns its entry."""
        try:
            file = self._file = self._file or self._open()
            while self._pieces:
                self._put(file, memoryview(self._pieces.popleft()))
            os.fsync(file.fileno())
        finally:
            self.close()
        return Entry(self._num_bytes, self._hash.hexdigest())

    def close(self) -> None:
        self._later = False
        self._pieces.clear()
        if self._file is not None:
            self._file.close()
        self._hashing.shutdown(wait=False)

    def _open(self) -> io.FileIO:
        fault("save.file")
        return self._path.open("wb", buffering=0)

    def _put(self, file: io.FileIO, view: memoryview) -> None:
        """Writes and hashes at the same time."""
        is_large = len(view) >= LARGE
        hashed = self._hashing.submit(self._hash.update, view) if is_large else self._hash.update(view)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError:
            file.close()
            raise
        finally:
            if hashed:
                hashed.result()  # bounded: it hashes `view`, which the caller may change afterwards


class _Stream(io.BufferedWriter):
    """Buffers small writes. Closing the stream leaves the file below open."""

    def close(self) -> None:
        self.flush()
