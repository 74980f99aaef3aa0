"""Makes torch.distributed.checkpoint write files with a `CheckpointWriter`, and unpickle only known types."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from openrlhf.checkpoint import pickles
from openrlhf.checkpoint.manifest import why_unwritten
from openrlhf.checkpoint.writer import CheckpointWriter
from openrlhf.errors import UsageError
from openrlhf.files import not_written

METADATA = ".metadata"
"""The file that marks a folder as a checkpoint of torch.distributed.checkpoint."""
_PLAIN = (torch.Size, torch.serialization._get_layout, PosixPath, filesystem._StorageInfo)
"""Types and functions in the list of contents, beside dtypes and the classes of its own module."""
_MODULES = ("torch", "torch.serialization", "pathlib", "pathlib._local")
_MODULES += (metadata.__name__, filesystem.__name__)
"""Modules that the list may name."""


def save_tensors(writer: CheckpointWriter, tensors: dict[str, Tensor]) -> None:
    """Writes tensors through `writer`. Collective. Raises RunError on all ranks if one could not write."""
    storage = FileSystemWriter(writer.folder, sync_files=False)
    storage.fs = TorchFiles(writer)
    try:
        dcp.save(tensors, storage_writer=storage)
    except CheckpointException as error:  # raised on all ranks if one fails
        reason = why_unwritten(next(iter(error.failures.values()))[0], writer.folder)
        raise not_written(writer.folder, reason) from error


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
        """Reads the list of contents. Raises UsageError if it is damaged, or lists anything but tensors:
        `torch.distributed.checkpoint` would unpickle that without limits."""
        file = Path(self.path, METADATA)
        with file.open("rb") as opened, pickles.refusing(file):
            metadata = _Contents(opened).load()
            if type(metadata) is not Metadata:
                raise pickle.UnpicklingError("it is no list of contents")
            for name, about in metadata.state_dict_metadata.items():
                if type(about) is not TensorStorageMetadata:
                    raise pickle.UnpicklingError(f"{name} is no tensor")
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        return metadata


def load_tensors(folder: Path, tensors: dict[str, Tensor], **options: Any) -> None:
    """Fills `tensors` from a checkpoint. Raises UsageError if one of its files is damaged. Collective, unless
    `options`, those of `torch.distributed.checkpoint.load`, say otherwise."""
    reader = TorchReader(folder)
    reader.read_metadata()  # torch would turn its error into another one
    try:
        dcp.load(tensors, storage_reader=reader, **options)
    except CheckpointException as error:  # raised on all ranks if one fails
        raise pickles.refusal(folder, next(iter(error.failures.values()))[0]) from error


def forged(folder: Path) -> str | None:
    """Returns the reason why the list of contents must not be read; None without one, or if it may be."""
    try:
        if (folder / METADATA).exists():
            TorchReader(folder).read_metadata()
    except UsageError as error:
        return f"{METADATA}: {error.text.splitlines()[0]}"
    return None


class _Contents(pickle.Unpickler):
    """Unpickles the list of a checkpoint's contents."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES and "." not in name:
            found = super().find_class(module, name)
            is_ours = isinstance(found, type) and found.__module__ == metadata.__name__
            if is_ours or isinstance(found, torch.dtype) or found in _PLAIN:
                return found
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
