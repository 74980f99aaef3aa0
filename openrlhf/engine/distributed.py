"""A process's device, and the group of processes it belongs to."""

import ctypes
import datetime
import os
import random
import socket

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from openrlhf.device import DEVICE_TYPE

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}

MALLOPT = {-3: 1 << 30, -1: 2**31 - 1}
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, bytes: smaller blocks come from the heap, and a free heap of less is
kept."""


def current_device() -> torch.device:
    """This process's device, after `init_distributed`."""
    return (
        torch.device(DEVICE_TYPE, torch.cuda.current_device())
        if DEVICE_TYPE == "cuda"
        else torch.device("cpu")
    )


def init_distributed(timeout_minutes: int = 60) -> None:
    """Join the group of ranks that the environment describes: torchrun's, deepspeed's, Ray's, or a group of
    one."""
    for name, value in _group_of_one().items():
        os.environ.setdefault(name, value)
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    else:  # its shared-memory collectives would be compiled on first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        _keep_freed_memory()
    backend, timeout = BACKENDS[DEVICE_TYPE], datetime.timedelta(minutes=timeout_minutes)
    if os.environ["WORLD_SIZE"] == "1" and not dist.is_initialized():
        # Alone a process needs no port, which another one could have taken.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed Python, NumPy and torch. `deterministic` also forbids kernels whose result may differ between
    runs."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        from transformers import enable_full_determinism  # loads peft: seconds in every process of a run

        enable_full_determinism(seed)


def leave_distributed() -> None:
    """Leave the group in step with the other ranks: gloo's threads abort a process that just exits."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def release_cached_memory() -> None:
    if DEVICE_TYPE == "cuda":
        torch.cuda.empty_cache()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def _keep_freed_memory() -> None:
    """Each pass allocates what the one before has freed. Left to itself glibc gives large blocks back to the
    system, which then clears every page again. The user's own MALLOC_* stand."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name.startswith("MALLOC_") for name in os.environ):
        for option, value in MALLOPT.items():
            libc.mallopt(option, value)


def _group_of_one() -> dict[str, str]:
    if "RANK" in os.environ:
        return {"LOCAL_RANK": "0"}
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
