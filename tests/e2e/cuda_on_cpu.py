"""Replacements of the few CUDA calls that vLLM's weight transfers make, for a machine without a GPU.
Importing this module installs them: a file stands for a GPU's memory, and the file's name for its handle."""

import itertools
import os
import tempfile
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import ipc_engine, packed_tensor

TIMEOUT = timedelta(seconds=60)
OPENED: list[tuple[int, str]] = []
"""(device, handle) of each piece of memory that this process has mapped."""
allocate = torch.empty
names = itertools.count()


def empty(*size: Any, device: Any = None, **options: Any) -> Tensor:
    """Replaces `torch.empty`: the shared buffer is the one on "cuda", without an index."""
    if device is None or torch.device(device).type != "cuda":
        return allocate(*size, device=device, **options)
    if torch.device(device).index is not None:
        return allocate(*size, **options)
    path = f"{tempfile.gettempdir()}/gpu{os.environ.get('RANK', 0)}-{os.getpid()}-{next(names)}"
    return _mapped(path, size[0])


def share(tensor: Tensor) -> tuple:
    """Describes a tensor as `reductions.reduce_tensor` describes one on a GPU."""
    storage = tensor.untyped_storage()
    where = (0, str(storage.filename).encode(), storage.nbytes(), 0, False, b"counter", 0, b"event", True)
    kind = (type(tensor), tensor.size(), tensor.stride(), 0, type(storage), tensor.dtype)
    return reductions.rebuild_cuda_tensor, kind + where


def rebuild(
    kind: type, size: Any, stride: Any, offset: int, storage: type, dtype: torch.dtype, device: int,
    handle: bytes, num_bytes: int, *more: Any,
) -> Tensor:  # fmt: skip
    assert (kind, storage, dtype) == (Tensor, torch.UntypedStorage, torch.uint8) and len(more) == 6
    OPENED.append((device, handle.decode()))
    return _mapped(handle.decode(), num_bytes)


class Communicator:
    """Communicator with the interface of vLLM's NCCL communicator, over gloo."""

    def __init__(self, group: StatelessProcessGroup, device: Any) -> None:
        store = dist.PrefixStore("data", group.store)
        self.rank = group.rank
        self.group = dist.ProcessGroupGloo(store, group.rank, group.world_size, TIMEOUT)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self.group.broadcast([tensor], options).wait()


class Stream:
    def synchronize(self) -> None:
        pass


def _mapped(path: str, num_bytes: int) -> Tensor:
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=num_bytes)
    return allocate(0, dtype=torch.uint8).set_(storage)


torch.empty = empty
packed_tensor.reduce_tensor = share
reductions.rebuild_cuda_tensor = rebuild
packed_tensor._get_streams = lambda device, count: tuple(Stream() for _ in range(count))
pynccl.PyNcclCommunicator = Communicator
torch.accelerator.current_device_index = lambda: int(os.environ.get("RANK", 0))
torch.accelerator.synchronize = lambda *args: None
torch.cuda.synchronize = torch.cuda.ipc_collect = lambda: None
torch.cuda.current_stream = lambda *args: Stream()
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=f"GPU-{index}")
assert ipc_engine.packed_ipc_producer is packed_tensor.packed_ipc_producer
