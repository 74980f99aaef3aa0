"""Makes torch.distributed.checkpoint write its files with a `CheckpointWriter`, and unpickle only known
types."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from openrlhf.backends import own_pickles
from openrlhf.backends.checkpoint_writer import CheckpointWriter

METADATA = ".metadata"
"""The file that marks a folder as a checkpoint of torch.distributed.checkpoint."""
_MODULES = (metadata.__name__, filesystem.__name__)
"""Modules whose classes the list of contents has."""
_PLAIN = (torch.Size, torch.serialization._get_layout, PosixPath)
"""Other types and functions in that list."""


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
        """Does nothing: files have their names at once, because the folder is renamed as a whole."""

    def rm_file(self, path: str | os.PathLike) -> None:
        """Does nothing. It is called before the rename, and the folder was empty."""


class TorchReader(FileSystemReader):
    """Reads a checkpoint of `torch.distributed.checkpoint`, whose list of contents is a pickle."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        file = Path(self.path, METADATA)
        with file.open("rb") as opened:
            try:
                metadata = _Contents(opened).load()
            except pickle.UnpicklingError as error:
                raise own_pickles.refusal(file, error) from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Contents(pickle.Unpickler):
    """Unpickles the list of a checkpoint's contents."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in ("torch", "torch.serialization", "pathlib", "pathlib._local", *_MODULES):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        found = super().find_class(module, name)
        is_ours = isinstance(found, type) and found.__module__ in _MODULES
        if not (is_ours or isinstance(found, torch.dtype) or found in _PLAIN):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return found
