"""Flat arrays that may grow beyond memory."""

import tempfile
from array import array
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np

from openrlhf.files import writing_to_cache

IN_MEMORY = 2**24
"""Bytes of an array that are held in memory."""


class GrowingArray:
    """An append-only array of numbers. Beyond `IN_MEMORY` bytes, all but the last numbers are in an unlinked
    file of the cache folder, whose disk space is freed when the process ends."""

    def __init__(self, typecode: str) -> None:
        """typecode: as in `array`."""
        self._last = array(typecode)
        self._stored = 0
        self._file: BinaryIO | None = None

    def __len__(self) -> int:
        return self._stored + len(self._last)

    def extend(self, numbers: Iterable[Any]) -> None:
        self._last.extend(numbers)
        if len(self._last) * self._last.itemsize > IN_MEMORY:
            self._store()

    def whole(self) -> np.ndarray:
        """Returns all numbers as a read-only array, memory-mapped where there is a file."""
        if self._file is None:
            return np.array(self._last)
        self._store()
        return np.memmap(self._file, dtype=self._last.typecode, mode="r", shape=(self._stored,))

    def _store(self) -> None:
        with writing_to_cache("Tokenised data does not fit into") as folder:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, it lives as long as this
            self._last.tofile(self._file)
            self._file.flush()
        self._stored += len(self._last)
        del self._last[:]
