"""What a frozen model thinks of a whole dataset, asked once before training."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.datasets.batches import Windows
from openrlhf.engine.distributed import current_device


class Answers(Protocol):
    def forward(self, rows: list, read: Callable) -> list[Tensor]: ...


def answers_of(model: Answers, windows: Windows, read: Callable, num_items: int) -> Tensor:
    """(n, 2) float32 on the CPU, the same on every rank: the two figures that `read(model, row)` (P, 2) gives
    for each item of a row."""
    found = torch.zeros(num_items, 2)
    for rows in windows.items(epoch=0):
        answers = model.forward([windows.pack(items) for items in rows], read)
        for items, answer in zip(rows, answers, strict=True):
            found[items] = answer
    found = found.to(current_device())
    dist.all_reduce(found)
    return found.cpu()
