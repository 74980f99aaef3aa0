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
    first, file = _file(folder, 0), _file(folder, rank)
    saved = pickles.load(first)["num_ranks"] if first.exists() else None
    if saved != num_ranks:
        if rank == 0:
            by = f"{saved} ranks" if saved else "a version without random states"
            logger.warning("%s was saved by %s: dropout continues with other random numbers", folder, by)
        return
    state = pickles.load(file)
    with pickles.refusing(file):
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and DEVICE_TYPE == "cuda":
            torch.cuda.set_rng_state(state["cuda"])


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"random_state_{rank}.pt"
