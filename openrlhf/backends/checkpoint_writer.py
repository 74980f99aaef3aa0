"""Writes one rank's files of a checkpoint so that their content can be checked when they are read."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.backends.manifest import Entry, Manifest, why_unwritten
from openrlhf.faults import fault
from openrlhf.files import not_written, sync_file


class CheckpointWriter:
    """The files that this rank writes into a checkpoint's folder. While the next file is written, a thread
    syncs the last one to the disk and computes its SHA-256.

    A write that fails is recorded instead of raised, because other ranks wait for this one in collectives:
    `finish` raises on all ranks.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._thread = ThreadPoolExecutor(1)
        self._entries: dict[str, Future[Entry]] = {}
        self._failure: tuple[str, str] | None = None

    def save(self, state: Any, path: str | Path) -> None:
        """Writes `state` with `torch.save`."""
        self.write(path, lambda: torch.save(state, path))

    def write(self, path: str | Path, write: Callable[[], object]) -> None:
        """Calls `write`, which writes the file `path`."""
        if self.attempt(path, write):
            self.add(path)

    def attempt(self, path: str | Path, write: Callable[[], object]) -> bool:
        """Calls `write`, which writes to `path`, unless an earlier write failed. Returns whether it
        succeeded."""
        if self._failure is not None:
            return False
        try:
            fault("save.file")
            write()
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError where the disk is full
            self._fail(error, path)
        return self._failure is None

    def add(self, path: str | Path) -> None:
        """Adds a file that has been written."""
        name = str(Path(path).relative_to(self.folder))
        self._entries[name] = self._thread.submit(_synced_entry, Path(path))

    def finish(self) -> None:
        """Waits until the files of all ranks are on the disk, and writes the manifest. Collective. Raises
        RunError on every rank where one of them could not write."""
        files = {}
        for name, entry in self._entries.items():
            try:
                files[name] = entry.result()
            except OSError as error:
                self._fail(error, self.folder / name)
        self._thread.shutdown()
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (files, self._failure))
        if failures := [failure for _, failure in found if failure]:
            raise not_written(*failures[0])
        if dist.get_rank() == 0:
            Manifest(files={name: entry for part, _ in found for name, entry in part.items()}).write(
                self.folder
            )

    def _fail(self, error: Exception, path: str | Path) -> None:
        self._failure = self._failure or (str(path), why_unwritten(error, self.folder))


def _synced_entry(file: Path) -> Entry:
    """Writes a file's content to the disk and returns its entry of the manifest."""
    sync_file(file)
    return Entry.of(file)
