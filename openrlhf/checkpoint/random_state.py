"""Random states of all ranks in a checkpoint, with which dropout continues exactly after a resume."""

import logging
import random
from pathlib import Path

import numpy as np
import torch

from openrlhf.checkpoint import pickles
from openrlhf.checkpoint.writer import CheckpointWriter
from openrlhf.device import DEVICE_TYPE

logger = logging.getLogger(__name__)


def save_random_state(writer: CheckpointWriter, rank: int, num_ranks: int) -> None:
    """Writes the random state of Python, NumPy, torch and this rank's GPU into a checkpoint's folder."""
    state = {
        "num_ranks": num_ranks,
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if DEVICE_TYPE == "cuda" else None,
    }
    writer.save(state, _file(writer.folder, rank))


def load_random_state(folder: str | Path, rank: int, num_ranks: int) -> None:
    """Restores the state that `save_random_state` wrote. If another number of ranks wrote it, or the
    checkpoint has none, logs a warning and restores nothing."""
    if saved_ranks(folder) != num_ranks:
        if rank == 0:
            logger.warning(
                "%s was saved by %s: dropout continues with other random numbers",
                folder,
                f"{saved_ranks(folder)} ranks" if saved_ranks(folder) else "a version without random states",
            )
        return
    state = _read(folder, rank)
    with pickles.refusing(_file(folder, rank)):
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and DEVICE_TYPE == "cuda":
            torch.cuda.set_rng_state(state["cuda"])


def saved_ranks(folder: str | Path) -> int | None:
    """Returns the number of ranks that wrote the checkpoint; None if it has no random states."""
    return _read(folder, 0)["num_ranks"] if _file(folder, 0).exists() else None


def _read(folder: str | Path, rank: int) -> dict:
    return pickles.load(_file(folder, rank))


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"random_state_{rank}.pt"
