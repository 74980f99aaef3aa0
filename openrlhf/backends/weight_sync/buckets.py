"""Lays out the weights of a sync: named tensors, concatenated in buckets. Trainer and engines compute the
same layout."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.memory.engines import bucket_size

ALIGNMENT = 64
"""Multiple of bytes at which each tensor starts in a bucket."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: str
    """Name of a torch dtype, such as float32."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent together in one buffer."""

    tensors: tuple[TensorMeta, ...]

    @property
    def num_bytes(self) -> int:
        return sum(_aligned(t.num_bytes) for t in self.tensors)

    def views(self, buffer: Tensor) -> Iterator[tuple[TensorMeta, Tensor]]:
        """Yields each tensor as a view of `buffer`, (num_bytes,) uint8."""
        offset = 0
        for t in self.tensors:
            yield t, buffer[offset : offset + t.num_bytes].view(getattr(torch, t.dtype)).view(t.shape)
            offset += _aligned(t.num_bytes)


def plan_buckets(tensors: list[TensorMeta], capacity: int) -> list[Bucket]:
    """Distributes the tensors, in order, over buckets of at most `capacity` bytes. A larger tensor has a
    bucket of its own."""
    buckets: list[list[TensorMeta]] = [[]]
    size = 0
    for t in tensors:
        if buckets[-1] and size + _aligned(t.num_bytes) > capacity:
            buckets.append([])
            size = 0
        buckets[-1].append(t)
        size += _aligned(t.num_bytes)
    return [Bucket(tuple(b)) for b in buckets if b]


def max_bucket_bytes(tensors: list[TensorMeta], capacity: int) -> int:
    """Returns an upper bound of the size of the buckets in which `plan_buckets` puts the tensors, or some of
    them."""
    sizes = [_aligned(t.num_bytes) for t in tensors]
    return bucket_size(max(sizes, default=0), sum(sizes), _aligned(capacity))


def as_json(tensors: Iterable[TensorMeta]) -> list[list]:
    return [[t.name, t.dtype, list(t.shape)] for t in tensors]


def parse_metas(tensors: list[list]) -> list[TensorMeta]:
    """Parses a list of [name, dtype, shape], as `as_json` writes it."""
    return [TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in tensors]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
