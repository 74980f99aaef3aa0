"""Computes the log-probs of a frozen model on a whole dataset once before training, and caches them on
disk."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from openrlhf.backends.distributed import ProcessMesh, current_device
from openrlhf.backends.model_rank import ModelRank
from openrlhf.data.batches import MiniBatches
from openrlhf.files import replacing
from openrlhf.observability.waits import tracked

logger = logging.getLogger(__name__)


def values_of_items(
    model: ModelRank,
    mini_batches: MiniBatches,
    read: Callable,
    num_items: int,
    mesh: ProcessMesh,
) -> np.ndarray:
    """Computes two values for each of the n items of a dataset. `read(model, row)` returns (P, 2) for a row
    of P items. Returns (n, 2) float32, the same on every rank. Collective."""
    found = torch.zeros(num_items, 2)
    for rows in tracked(mini_batches.items(epoch=0), len(mini_batches), "reference log-probs, batches"):
        answers = model.forward([mini_batches.pack(items) for items in rows], read)
        for items, answer in zip(rows, answers, strict=True):
            found[items] = answer
    found = found.to(current_device())
    dist.all_reduce(found, group=mesh.data_group)
    return found.cpu().numpy()


def cached_array(path: Path, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns the array stored in `path`. If not every rank can read this file, all ranks call `compute`, and
    its result is stored there. Collective."""
    try:
        kept = np.load(path, allow_pickle=False) if path.exists() else None
    except (OSError, EOFError, ValueError) as damage:
        logger.warning("%s: damaged (%s); computing it again", path, damage)
        kept = None
    found = torch.tensor(int(kept is not None), device=current_device())
    dist.all_reduce(found, dist.ReduceOp.MIN)
    if found.item() and kept is not None:
        return kept
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
        logger.warning("%s: reference log-probs cannot be cached: %s", path, error.strerror or error)
