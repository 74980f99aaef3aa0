"""A sum over the bits of named tensors, by which what was loaded is compared with what was sent."""

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

WORD = 8
"""Bytes that are summed as one number."""
PLACES = 1021
"""Words are told apart by their place modulo this prime."""
CHUNK_ROWS, CPU_CHUNK_ROWS = 1 << 13, 1 << 7
"""Times PLACES: words that are summed at a time. 67 MB, so that a GPU is asked rarely; 1 MB, which stays in a
core's cache."""


class Checksum:
    """Sum over named tensors' bits modulo 2^64, in any order of the tensors. A tensor that is missing,
    doubled, renamed or changed shows, and so does one whose elements changed places.

    Bits are summed in words of 64, as fast as memory is read. The upper halves are summed once more: of a
    word times an even number 2^64 would swallow the uppermost bits.

    `add` only queues work on the tensor's device, on the current stream. `value` waits for it, and may be
    read when all streams have been waited for.
    """

    def __init__(self) -> None:
        self.terms: list[Tensor] = []

    @property
    def value(self) -> int:
        return int(torch.stack(self.terms).sum()) % (1 << 64) if self.terms else 0

    def add(self, name: str, tensor: Tensor) -> None:
        by_place = torch.zeros(2, PLACES, dtype=torch.int64, device=tensor.device)
        for rows in _rows_of_words(tensor.detach().contiguous().view(-1).view(torch.uint8)):
            by_place[0] += rows.sum(0)
            by_place[1] += (rows >> 32).sum(0)
        places = torch.arange(1, 2 * PLACES + 1, device=tensor.device).view(2, PLACES)
        odd = 2 * zlib.crc32(name.encode()) + 1  # so that no bit of the sum is lost
        self.terms.append(((by_place * places).sum() + tensor.numel()) * odd)


def _rows_of_words(data: Tensor) -> Iterator[Tensor]:
    """(rows, PLACES) words of bytes at a time; what is missing of the last row is zero."""
    whole = len(data) - len(data) % (WORD * PLACES)
    head, last = data[:whole], data.new_zeros(WORD * PLACES)
    if head.storage_offset() % WORD:
        head = head.clone()
    last[: len(data) - whole] = data[whole:]
    chunk_rows = CPU_CHUNK_ROWS if data.device.type == "cpu" else CHUNK_ROWS
    yield from head.view(torch.int64).view(-1, PLACES).split(chunk_rows)
    yield last.view(torch.int64).view(1, PLACES)
