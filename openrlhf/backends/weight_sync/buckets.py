"""Weights as both ends of a sync lay them out: tensors with names and shapes, end to end in buckets."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorMeta:
    name: str
    dtype: str
    """As torch names it: float32."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together, and where each lies in the buffer."""

    tensors: tuple[TensorMeta, ...]

    @property
    def num_bytes(self) -> int:
        return sum(_aligned(t.num_bytes) for t in self.tensors)

    def views(self, buffer: Tensor) -> Iterator[tuple[TensorMeta, Tensor]]:
        offset = 0
        for t in self.tensors:
            yield t, buffer[offset : offset + t.num_bytes].view(getattr(torch, t.dtype)).view(t.shape)
            offset += _aligned(t.num_bytes)


def plan_buckets(tensors: list[TensorMeta], capacity: int) -> list[Bucket]:
    """In order, each at most `capacity` bytes unless a single tensor is larger. Both sides compute the same
    plan."""
    buckets: list[list[TensorMeta]] = [[]]
    size = 0
    for t in tensors:
        if buckets[-1] and size + _aligned(t.num_bytes) > capacity:
            buckets.append([])
            size = 0
        buckets[-1].append(t)
        size += _aligned(t.num_bytes)
    return [Bucket(tuple(b)) for b in buckets if b]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
