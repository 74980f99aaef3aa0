"""Weights from one process to another on one GPU, as a weight sync sends them: through vLLM's packed producer
and consumer, with the checksum of `openrlhf/backends/weight_sync/checksum.py` on both sides.

Without vLLM its one file that does this is enough; tools/gpu_wheels.py carries it, and it needs nothing but
torch. On a CPU the buffer is a file that both processes map, and the file's name is the handle.
"""

import openrlhf  # noqa: F401  first: it repairs imports of CUDA builds

# isort: split
import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from gpukit.machine import fastest, wait_for_device
from gpukit.stage import Figures, Setting
from openrlhf.backends.weight_sync.checksum import Checksum
from openrlhf.backends.weight_sync.sender import BUCKET_BYTES

ROUNDS = 5
TIMEOUT = 240.0
"""Seconds that the other process may take to answer."""


def ipc(setting: Setting) -> Figures:
    """Measures how fast weights reach another process, packed into a buffer that is opened anew each time,
    copied out and summed up on both sides; and how fast the same bytes are copied. Raises RuntimeError if
    other bytes arrive."""
    with _device(setting) as device:
        weights = _weights(device, layers=setting.size(16, 4), width=setting.size(4096, 128))
        num_bytes = sum(weight.nbytes for _, weight in weights)
        context = multiprocessing.get_context("spawn")  # a fork would lose CUDA
        ours, theirs = context.Pipe()
        consumer = context.Process(target=consume, args=(theirs, setting), name="consumer")
        consumer.start()
        theirs.close()
        try:
            capacity = setting.size(BUCKET_BYTES["ipc"], 200_000)
            produce(ours, weights[:2], capacity)  # the first call of each kernel is slow
            sent = fastest(lambda: produce(ours, weights, capacity), setting, ROUNDS)
            ours.send(None)
            consumer.join(TIMEOUT)
        finally:
            consumer.kill()
            consumer.join()
        source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copied = fastest(lambda: target.copy_(source), setting, ROUNDS)
        return {"ipc GB/s": num_bytes / sent / 1e9, "copy GB/s": num_bytes / copied / 1e9}


def produce(connection: Connection, weights: list[tuple[str, Tensor]], capacity: int) -> None:
    """Sends all weights through a buffer of `capacity` bytes, and compares the other side's checksum."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    checksum = Checksum()

    def summed_up(item: tuple[str, Tensor]) -> Tensor:
        checksum.add(*item)
        return item[1]

    gpu = str(torch.cuda.get_device_properties(0).uuid)
    for chunk in packed_ipc_producer(iter(weights), gpu, summed_up, capacity):
        connection.send((chunk.ipc_handle, chunk.names, chunk.shapes, chunk.dtype_names, chunk.tensor_sizes))
        _answer(connection)  # waits for the checksum before it fills the buffer again
    connection.send("sum")
    arrived = _answer(connection)
    torch.cuda.ipc_collect()  # the other side has released the buffer
    if arrived != checksum.value:
        raise RuntimeError(
            f"the weights sent have the checksum {checksum.value:#x}, those that arrived {arrived:#x}"
        )


def consume(connection: Connection, setting: Setting) -> None:
    """Takes chunks until it receives None, and sends the checksum when asked."""
    from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter, packed_ipc_consumer

    with _device(setting):
        importer, checksum = PackedBufferImporter(), Checksum()
        while (message := connection.recv()) is not None:
            if message == "sum":
                importer.close()  # vLLM closes it at the end of an update
                connection.send(checksum.value)
                checksum = Checksum()
            else:
                for name, tensor in packed_ipc_consumer(*message, device_index=0, importer=importer):
                    checksum.add(name, tensor)
                wait_for_device(setting)
                connection.send(True)


def _weights(device: torch.device, layers: int, width: int) -> list[tuple[str, Tensor]]:
    """Makes named random bfloat16 weights with the shapes of a model."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = {"norm.weight": (width,), "qkv.weight": (3 * width, width), "down.weight": (width, 4 * width)}
    return [
        (f"layers.{i}.{name}", torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16))
        for i in range(layers)
        for name, shape in shapes.items()
    ]


def _answer(connection: Connection) -> Any:
    if not connection.poll(TIMEOUT):
        raise RuntimeError(f"the receiving process did not answer for {TIMEOUT:.0f} s")
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError("the receiving process died") from None


@contextmanager
def _device(setting: Setting) -> Iterator[torch.device]:
    """Yields the GPU; in a rehearsal the CPU, with the calls of CUDA that vLLM makes replaced."""
    if not setting.rehearsal:
        torch.cuda.set_device(0)
        yield torch.device("cuda", 0)
        return
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ipc-"))
        for owner, name, replaced in _as_files(folder):
            stack.enter_context(patch.object(owner, name, replaced))
        yield torch.device("cpu")


def _as_files(folder: str) -> list[tuple[Any, str, Any]]:
    """Lists replacements of CUDA as (owner, name, replacement)."""
    from vllm.distributed.weight_transfer import packed_tensor

    allocate, names = torch.empty, itertools.count()

    def mapped(path: str, num_bytes: int) -> Tensor:
        storage: Any = torch.UntypedStorage.from_file(path, shared=True, nbytes=num_bytes)
        return allocate(0, dtype=torch.uint8).set_(storage)

    def empty(*size: Any, device: Any = None, **options: Any) -> Tensor:
        if device != "cuda":
            return allocate(*size, device=device, **options)
        return mapped(f"{folder}/{next(names)}", size[0])

    def reduce(tensor: Tensor) -> tuple[Any, tuple]:
        """Returns the arguments in the places of the real function's, which end with the handle and the byte
        offset."""
        storage = tensor.untyped_storage()
        path = os.fsencode(str(storage.filename))
        return None, (
            type(tensor),
            tensor.size(),
            tensor.stride(),
            0,
            None,
            tensor.dtype,
            0,
            path,
            len(tensor),
        )

    def rebuild(*args: Any) -> Tensor:
        return mapped(os.fsdecode(args[7]), args[8])

    nothing = SimpleNamespace(synchronize=lambda: None)
    return [
        (torch, "empty", empty),
        (packed_tensor, "reduce_tensor", reduce),
        (reductions, "rebuild_cuda_tensor", rebuild),
        (torch.cuda, "ipc_collect", nothing.synchronize),
        (torch.cuda, "current_stream", lambda *_: nothing),
        (torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(uuid="GPU-0")),
    ]
