"""Boundaries of the sequences in a row."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Packing(NamedTuple):
    """Sequences behind each other, such as those of a packed row."""

    lengths: tuple[int, ...]
    cumulative: Tensor  # (B + 1,) int32, on the row's device

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        # Summed on the CPU, because copying a list to a GPU would wait for the GPU.
        cumulative = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32)
        return cls(tuple(lengths), cumulative.to(device, non_blocking=True))
