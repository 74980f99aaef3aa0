"""Log-probs of a frozen model on a whole dataset, computed once before training, and kept."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from openrlhf.backends.distributed import ProcessMesh, current_device
from openrlhf.data.batches import Windows
from openrlhf.files import replacing
from openrlhf.observability.progress import tracked

logger = logging.getLogger(__name__)


class Answers(Protocol):
    def forward(self, rows: list, read: Callable) -> list[torch.Tensor]: ...


def answers_of(
    model: Answers, windows: Windows, read: Callable, num_items: int, mesh: ProcessMesh
) -> np.ndarray:
    """Returns (n, 2) float32, the same on every rank: the two values that `read(model, row)`, (P, 2), returns
    for each item of a row."""
    found = torch.zeros(num_items, 2)
    for rows in tracked(windows.items(epoch=0), len(windows), "reference log-probs, batches"):
        answers = model.forward([windows.pack(items) for items in rows], read)
        for items, answer in zip(rows, answers, strict=True):
            found[items] = answer
    found = found.to(current_device())
    dist.all_reduce(found, group=mesh.data_group)
    return found.cpu().numpy()


def kept(path: Path, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns the array in `path`, or computes it with `compute` and stores it there. Collective: unless
    every rank finds the file, all compute."""
    found = torch.tensor(int(path.exists()), device=current_device())
    dist.all_reduce(found, dist.ReduceOp.MIN)
    if found.item():
        return np.load(path, allow_pickle=False)
    array = compute()
    if os.environ["LOCAL_RANK"] == "0":
        _write(path, array)
    return array


def _write(path: Path, array: np.ndarray) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, shared=True) as beside, beside.open("wb") as file:
            np.save(file, array)
    except OSError as error:
        logger.warning("%s: reference log-probs cannot be kept: %s", path, error.strerror or error)
