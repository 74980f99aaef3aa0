"""A process's device, process group and position in the mesh of its model's ranks."""

import datetime
import errno
import ipaddress
import os
import platform
import random
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

from openrlhf import heap
from openrlhf.device import DEVICE_TYPE
from openrlhf.errors import ErrorCode, RunError, UsageError, first_line
from openrlhf.files import appears, marked
from openrlhf.mesh import Mesh

ResultT = TypeVar("ResultT")

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMesh(Mesh):
    """The mesh of this process's model, with this rank's process groups. The samples of a batch are split
    along the dimension `data`, so a sum over `data_group` counts each sample once."""

    rank: int = 0
    data_group: dist.ProcessGroup | None = None
    """Ranks with other samples, and the same slice of rows and of matrices. None: all ranks."""
    sequence_group: dist.ProcessGroup | None = None
    """Ranks that each compute a slice of the same rows (sequence parallelism). None: rows are not split."""
    tensor_group: dist.ProcessGroup | None = None
    """Ranks among which matrices are split (tensor parallelism). None: matrices are not split."""
    copies_group: dist.ProcessGroup | None = None
    """Ranks with the same tensor-parallel shard, among which DeepSpeed partitions gradients and optimizer
    states. None: all ranks."""

    @classmethod
    def of(cls, mesh: Mesh, rank: int, **groups: dist.ProcessGroup) -> "ProcessMesh":
        sizes = {"data": mesh.data, "sequence": mesh.sequence, "tensor": mesh.tensor}
        return ProcessMesh(**sizes, rank=rank, **groups)

    @classmethod
    def joined(cls, *, sequence: int = 1, tensor: int = 1) -> "ProcessMesh":
        """Builds the mesh of the default process group's ranks, and its groups. Collective. Raises UsageError
        if the number of ranks is not a multiple of `sequence * tensor`."""
        num_ranks = dist.get_world_size()
        mesh = Mesh.within(num_ranks, sequence=sequence, tensor=tensor)
        if mesh.size != num_ranks:
            text = (
                f"{num_ranks} ranks are not a multiple of {sequence} (--ds.ring_attn_size) x {tensor} "
                f"(--ds.tensor_parallel_size).\nStart a multiple of {mesh.replica} ranks."
            )
            raise UsageError(ErrorCode.RESOURCES, text)
        groups = {}
        if mesh.replica > 1:
            ranks = init_device_mesh(DEVICE_TYPE, mesh.shape, mesh_dim_names=mesh.DIMENSIONS)
            groups["data_group"] = ranks.get_group("data")
            if mesh.sequence > 1:
                groups["sequence_group"] = ranks.get_group("sequence")
        if mesh.tensor > 1:
            shape, names = (mesh.copies, mesh.tensor), ("copies", "tensor")
            ranks = init_device_mesh(DEVICE_TYPE, shape, mesh_dim_names=names)
            groups |= {f"{name}_group": ranks.get_group(name) for name in names}
        return ProcessMesh.of(mesh, dist.get_rank(), **groups)

    @property
    def data_rank(self) -> int:
        """Coordinate of this rank along the data dimension. Ranks with the same coordinate have the same
        samples."""
        return self.coordinates(self.rank).data

    @property
    def copy(self) -> int:
        """Index of this rank in `copies_group`, the ranks with the same tensor-parallel shard."""
        return self.rank // self.tensor

    @property
    def is_first(self) -> bool:
        """True on rank 0, which logs and exports."""
        return self.rank == 0


def current_device() -> torch.device:
    """Returns this process's device. Call `init_distributed` first."""
    return (
        torch.device(DEVICE_TYPE, torch.cuda.current_device())
        if DEVICE_TYPE == "cuda"
        else torch.device("cpu")
    )


def init_distributed(timeout_minutes: float = 60) -> None:
    """Joins the process group that the environment variables of torchrun, deepspeed or Ray describe. Without
    them, creates a group of one rank."""
    for name, value in _group_of_one().items():
        os.environ.setdefault(name, value)
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(_resolve_local_rank())
    else:
        heap.keep()
    if dist.is_initialized():
        return
    backend, timeout = BACKENDS[DEVICE_TYPE], datetime.timedelta(minutes=timeout_minutes)
    if os.environ["WORLD_SIZE"] == "1":
        # A single process needs no port, so none can be in use.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    device = current_device() if DEVICE_TYPE == "cuda" else None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = _store_at_its_address(rank, size, timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device
        )
    except (dist.DistError, OSError) as error:
        place = f"rank {rank} of {size} did not meet the others at {os.environ['MASTER_ADDR']}:"
        text = f"{place}{os.environ['MASTER_PORT']}: {first_line(error)}.\nStart all ranks within "
        text += f"{timeout_minutes:g} minutes, with the address and a free port of rank 0's machine."
        raise RunError(ErrorCode.CLUSTER, text) from error


def _store_at_its_address(rank: int, size: int, timeout: datetime.timedelta) -> dist.Store | None:
    """Returns the store in which ranks meet, which listens at MASTER_ADDR alone; torch's own would listen at
    all addresses of the machine. Returns None where the launcher has the store (torchrun), or MASTER_ADDR is
    a host name, whose address may differ between machines."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        is_address = bool(ipaddress.ip_address(host))
    except ValueError:
        is_address = False
    if "TORCHELASTIC_RUN_ID" in os.environ or not is_address:
        return None
    if rank > 0:
        return dist.TCPStore(host, port, size, timeout=timeout)
    master = partial(dist.TCPStore, host, port, size, is_master=True, timeout=timeout, wait_for_workers=False)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=max(128, size))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:  # behind a network address translation
            raise
        return master()
    return master(master_listen_fd=bound.detach())


def use_own_cores() -> None:
    """Lets this rank use its share of the CPU cores, for optimizer steps and moving averages on the CPU in
    runs on GPUs. torchrun and Ray limit a process to one thread. An OMP_NUM_THREADS above 1 is respected."""
    if DEVICE_TYPE == "cuda" and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count())
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seeds Python, NumPy and torch. `deterministic`: also allow only kernels whose results are equal in
    every run."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        transformers.enable_full_determinism(seed)  # loaded when it is used: it imports peft


def machines_without(folder: str) -> list[str]:
    """Returns the names of the machines that do not share `folder` with rank 0's machine: they do not see a
    file that rank 0 creates there. Collective."""
    with marked(folder) if dist.get_rank() == 0 else nullcontext() as mark:
        shared_mark, seen = [mark], [("", True)] * dist.get_world_size()
        dist.broadcast_object_list(shared_mark)
        assert shared_mark[0] is not None  # rank 0 has set it
        dist.all_gather_object(seen, (platform.node(), appears(shared_mark[0])))
    return sorted({machine for machine, found in seen if not found})


def from_first(call: Callable[[], ResultT]) -> ResultT:
    """Returns rank 0's result of `call` on every rank. Collective."""
    result: list[Any] = [call() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]


def on_any_rank(flag: bool) -> bool:
    """Tells whether `flag` is True on some rank; the answer is the same on all ranks. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    flags = torch.tensor(int(flag), device=current_device())
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())


def leave_distributed() -> None:
    """Leaves the process group together with the other ranks. Without this, gloo's threads may abort the
    process at exit."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def release_cached_memory() -> None:
    """Returns torch's cached GPU memory to the device, for other processes."""
    if DEVICE_TYPE == "cuda":
        torch.cuda.empty_cache()


def free_port() -> int:
    """Returns the number of a TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def _resolve_local_rank() -> int:
    """Returns the index of this rank's GPU, and sets LOCAL_RANK to it for DeepSpeed. If the launcher shows
    each rank only one GPU (`srun --gpus-per-task 1`), the index is 0 on every rank."""
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if "TORCHELASTIC_RUN_ID" in os.environ and local_rank >= gpus:  # torchrun shows every GPU to every rank
        text = (
            f"{os.environ['LOCAL_WORLD_SIZE']} ranks run on a machine where {gpus} GPUs are visible, and each"
            f" rank needs a GPU of its own.\nStart at most {gpus} ranks (--nproc_per_node {gpus})."
        )
        raise UsageError(ErrorCode.RESOURCES, text)
    os.environ["LOCAL_RANK"] = str(local_rank % gpus)
    return local_rank % gpus


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
