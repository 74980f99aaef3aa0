"""Memory that a trainer shares with engines on its machine. It is not a file of any file system: the kernel
frees it when its processes have ended, however they end, and limits of /dev/shm do not apply."""

import mmap
import os
import uuid

import torch
from torch import Tensor


class SharedMemory:
    """Memory of this process that other processes of the same user can map."""

    def __init__(self, num_bytes: int) -> None:
        self.name = f"openrlhf-{uuid.uuid4().hex}"
        self.file = os.memfd_create(self.name)
        os.ftruncate(self.file, num_bytes)
        self.tensor = _mapped(self.file, num_bytes)
        """The memory, (num_bytes,) uint8. A page is allocated when it is first written."""

    @property
    def address(self) -> list[str]:
        """Argument of `open_memory` in another process, valid until `close`."""
        return [f"/proc/{os.getpid()}/fd/{self.file}", self.name]

    def close(self) -> None:
        """Prevents other processes from mapping the memory. Existing mappings remain."""
        os.close(self.file)


def open_memory(address: list[str]) -> Tensor:
    """Maps the `SharedMemory` of another process and returns it, (num_bytes,) uint8. Raises OSError if this
    process cannot reach it, for instance on another machine or in another container."""
    path, name = address
    file = os.open(path, os.O_RDWR)
    try:
        if name not in os.readlink(f"/proc/self/fd/{file}"):  # another machine may have a file at this path
            raise FileNotFoundError(f"{path} is not the memory {name}")
        return _mapped(file, os.fstat(file).st_size)
    finally:
        os.close(file)


def _mapped(file: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
