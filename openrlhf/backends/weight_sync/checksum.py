"""A checksum over the bits of named tensors, with which an engine's loaded weights are compared with those
sent."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

WORD = 8
"""Bytes of a word, the unit of the sum."""
PLACES = 1021
"""Number of words in a row, a prime. A word's factor in the sum depends on its place in its row."""
CHUNK_ROWS, CPU_CHUNK_ROWS = 1 << 13, 1 << 7
"""Number of rows that are summed at a time: 67 MB on a GPU, so that there are few kernel launches, and 1 MB
on a CPU, which fits into a core's cache."""


class Checksum:
    """A sum over the bits of named tensors modulo 2^64, independent of the tensors' order. It changes if a
    tensor is missing, doubled, renamed or changed, or if elements of a tensor swap places.

    Bits are summed in 64-bit words, at the speed of reading memory. The upper halves of the words are summed
    a second time, because a word times an even factor loses its highest bits modulo 2^64.

    `add` only queues work on the current stream of the tensor's device. `value` waits for the work; read it
    when all streams are synchronized.
    """

    def __init__(self) -> None:
        self.terms: list[Tensor] = []

    @property
    def value(self) -> int:
        return int(torch.stack(self.terms).sum()) % (1 << 64) if self.terms else 0

    def add(self, name: str, tensor: Tensor) -> None:
        by_place = torch.zeros(2, PLACES, dtype=torch.int64, device=tensor.device)
        for rows in _rows_of_words(tensor.detach().contiguous().view(-1).view(torch.uint8)):
            words: Any = rows.numpy() if rows.device.type == "cpu" else rows  # NumPy is faster than torch
            by_place[0] += torch.as_tensor(words.sum(0))
            by_place[1] += torch.as_tensor((words >> 32).sum(0))
        places = torch.arange(1, 2 * PLACES + 1, device=tensor.device).view(2, PLACES)
        odd = 2 * zlib.crc32(name.encode()) + 1  # an odd factor loses no bit modulo 2^64
        self.terms.append(((by_place * places).sum() + tensor.numel()) * odd)


def _rows_of_words(data: Tensor) -> Iterator[Tensor]:
    """Yields the bytes as words in chunks of shape (rows, PLACES); the last row is padded with zeros."""
    whole = len(data) - len(data) % (WORD * PLACES)
    head, last = data[:whole], data.new_zeros(WORD * PLACES)
    if head.storage_offset() % WORD:
        head = head.clone()
    last[: len(data) - whole] = data[whole:]
    chunk_rows = CPU_CHUNK_ROWS if data.device.type == "cpu" else CHUNK_ROWS
    yield from head.view(torch.int64).view(-1, PLACES).split(chunk_rows)
    yield last.view(torch.int64).view(1, PLACES)
