"""Writes one rank's checkpoint files, and the hashes by which a reader checks them."""

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
    """Writes this rank's files of a checkpoint. While one file is written, threads sync the previous one to
    the disk and compute its SHA-256.

    A failed write is recorded instead of raised, because other ranks would wait for this one in collectives.
    `finish` raises on all ranks.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._threads = ThreadPoolExecutor(2)
        self._entries: dict[str, tuple[Future[None], Future[Entry]]] = {}
        self._failure: tuple[str, str] | None = None

    def save(self, state: Any, path: str | Path) -> None:
        """Writes `state` with `torch.save`."""
        self.write(path, lambda: torch.save(state, path))

    def write(self, path: str | Path, write: Callable[[], object]) -> None:
        """Calls `write`, which must write the file `path`, and adds the file."""
        if self.attempt(path, write):
            self.add(path)

    def attempt(self, path: str | Path, write: Callable[[], object]) -> bool:
        """Calls `write`, which writes to `path`, unless an earlier write failed. Returns True if it
        succeeded."""
        if self._failure is not None:
            return False
        try:
            fault("save.file")
            write()
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
            self._fail(error, path)
        return self._failure is None

    def add(self, path: str | Path) -> None:
        """Adds a file that exists already."""
        name = str(Path(path).relative_to(self.folder))
        submit = self._threads.submit
        self._entries[name] = submit(sync_file, Path(path)), submit(Entry.of, Path(path))

    def finish(self) -> None:
        """Waits until the files of all ranks are on the disk, and writes the manifest. Collective. If any
        rank could not write, raises RunError on every rank."""
        files = {}
        for name, (synced, entry) in self._entries.items():
            try:
                synced.result()
                files[name] = entry.result()
            except OSError as error:
                self._fail(error, self.folder / name)
        self._threads.shutdown()
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
