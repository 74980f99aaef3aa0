"""Writing of torch.distributed.checkpoint's files through a `CheckpointWriter`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from openrlhf.backends.checkpoint_writer import CheckpointWriter


def storage_of(writer: CheckpointWriter) -> FileSystemWriter:
    """Returns the storage with which `torch.distributed.checkpoint.save` writes through `writer`."""
    storage = FileSystemWriter(writer.folder, sync_files=False)
    storage.fs = TorchFiles(writer)
    return storage


class TorchFiles(FileSystem):
    """A file system that passes every new file to `writer`."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self.writer = writer

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "wb"
        with self.writer.opened(Path(str(path).removesuffix(".tmp"))) as stream:
            yield stream

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """Does nothing: the folder as a whole is written under another name."""
