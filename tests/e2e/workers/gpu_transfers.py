"""Weights through vLLM's own senders and receivers for GPUs, with `cuda_on_cpu` in the place of CUDA; reports
what arrived, where, and how."""

import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cuda_on_cpu
import ray
import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from openrlhf.backends.vllm.weight_receiver import CheckedIPC, CheckedNCCL
from openrlhf.backends.weight_sync.buckets import TensorMeta, max_bucket_bytes
from openrlhf.backends.weight_sync.sender import BUCKET_BYTES, WeightSender
from openrlhf.cluster.engine_client import RayEngineClient


class Trainer:
    """Model in training on every rank; all ranks must join the gather of each of its tensors."""

    def __init__(self, shapes: dict[str, tuple[torch.dtype, list[int]]]) -> None:
        self.tensors = {}
        for i, (name, (dtype, shape)) in enumerate(shapes.items()):
            self.tensors[name] = torch.full(shape, i + 1.0, dtype=dtype)
            self.tensors[name].view(-1)[:: 4001 + i] = i - 0.5
        self.gathered: list[str] = []

    def weights(self, bucket_bytes: int, part: str = "merged") -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.items():
            dist.barrier()
            self.gathered.append(name)
            yield name, tensor

    def weight_metadata(self, part: str = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]


class Model(nn.Module):
    def __init__(self, expected: dict[str, Tensor]) -> None:
        super().__init__()
        self.expected, self.loaded, self.wrong = dict(expected), [], []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.loaded.append(name)
            if tensor.dtype != self.expected[name].dtype or not tensor.equal(self.expected[name]):
                self.wrong.append(name)


class Worker:
    """Worker of a vLLM engine of `size` workers."""

    def __init__(self, kind: type, expected: dict[str, Tensor], device: int, rank: int, size: int) -> None:
        parallel = SimpleNamespace(data_parallel_index=0, world_size=size, rank=rank)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        self.model = Model(expected)
        self.receiver = kind(None, config, torch.device("cuda", device), self.model)

    def call(self, method: str, *args: Any) -> Any:
        if method == "init_weight_transfer_engine":
            return self.receiver.init_transfer_engine(self.receiver.parse_init_info(*args))
        return getattr(self.receiver, method)(*args)


class Engine:
    """Handle of an engine's actor: calls reach all workers through the message that vLLM's frontend sends to
    its core. An ObjectRef is represented by its future."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.threads = ThreadPoolExecutor(len(workers) + 1)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._asked(method, args))

    def _asked(self, method: str, args: tuple) -> Any:
        answer = self.threads.submit(self._all, method, args)
        return SimpleNamespace(future=lambda: answer)

    def _all(self, method: str, args: tuple) -> Any:
        if method == "loaded_checksums":
            return [worker.receiver.checksum.value for worker in self.workers]
        args = () if method == "finish_weight_update" else args
        received = MsgpackDecoder().decode(MsgpackEncoder().encode(args))
        return [f.result() for f in [self.threads.submit(w.call, method, *received) for w in self.workers]]


def send(backend: str, trainer: Trainer, engines: list[Engine], port: int, times: int) -> None:
    size = len(engines[0].workers) if engines else 1
    client = RayEngineClient(engines, size)
    sender = WeightSender(
        trainer, client, backend=backend, address="127.0.0.1", port=port, rank=dist.get_rank()
    )
    for version in range(times):
        sender.send(version)


def refusal(handle: tuple) -> str:
    """Returns vLLM's own message of refusal for a handle."""
    try:
        MsgpackEncoder().encode(handle)
    except TypeError as error:
        return str(error)
    return ""


def ipc(spec: dict) -> dict:
    """Sends through CUDA IPC: every rank has a GPU of its own, which it shares with an engine."""
    mebi = 1 << 20
    trainer = Trainer(
        {
            "norm": (torch.float32, [33]),
            "embed": (torch.bfloat16, [spec["largest"] * mebi // 2]),
            **{f"layer.{i}": (torch.bfloat16, [spec["layer"] * mebi // 2, 1]) for i in range(4)},
            "scale": (torch.float32, []),
        }
    )
    engines = []
    if dist.get_rank() == 0:
        kinds = [Worker(CheckedIPC, trainer.tensors, device, 0, 1) for device in range(dist.get_world_size())]
        engines = [Engine([worker]) for worker in kinds]
    refused = refusal(cuda_on_cpu.share(cuda_on_cpu.empty(1, device="cuda")))
    os.environ |= spec["environment"]
    send("ipc", trainer, engines, spec["port"], spec["times"])
    metas = [TensorMeta(n, str(d)[6:], s) for n, d, s in trainer.weight_metadata()]
    return {
        "refused": refused,
        "gathered": len(trainer.gathered),
        "tensors": len(trainer.tensors),
        "loaded": [len(e.workers[0].model.loaded) for e in engines],
        "wrong": [e.workers[0].model.wrong for e in engines],
        "opened": [[d, Path(p).name.split("-")[0]] for d, p in cuda_on_cpu.OPENED],
        "buffer": max_bucket_bytes(metas, BUCKET_BYTES["ipc"]),
    }


def nccl(spec: dict) -> dict:
    """Sends through NCCL to two engines of two workers."""
    trainer = Trainer(
        {
            "norm": (torch.float32, [33]),
            "embed": (torch.bfloat16, [80 << 20, 1]),  # 160 MiB
            **{f"layer.{i}": (torch.bfloat16, [9 << 20]) for i in range(4)},
        }
    )
    made: list[tuple[int, int]] = []
    sizes: list[int] = []

    class Recorded(cuda_on_cpu.Communicator):
        def __init__(self, group: Any, device: Any) -> None:
            made.append((group.rank, group.world_size))
            super().__init__(group, device)

        def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
            if self.rank == 0:
                sizes.append(tensor.numel())
            super().broadcast(tensor, src, stream)

    engines = [
        Engine([Worker(CheckedNCCL, trainer.tensors, rank, rank, 2) for rank in range(2)]) for _ in range(2)
    ]
    if name := spec["unknown"]:
        del engines[1].workers[1].model.expected[name]
    with (
        patch.object(cuda_on_cpu.pynccl, "PyNcclCommunicator", Recorded),
        warnings.catch_warnings(record=True) as said,
    ):
        send("nccl", trainer, engines, spec["port"], spec["times"])
    workers = [worker for engine in engines for worker in engine.workers]
    return {
        "groups": sorted(made),
        "sizes": sizes,
        "loaded": [len(w.model.loaded) for w in workers],
        "wrong": [w.model.wrong for w in workers],
        "said": [str(w.message) for w in said],
    }


def on_rank(spec: dict) -> dict:
    ray.put, tempfile.tempdir = lambda x: x, spec["out"]
    found = {"ipc": ipc, "nccl": nccl}[spec["backend"]](spec)
    for memory in Path(spec["out"]).glob(f"gpu{dist.get_rank()}-*"):
        memory.unlink()
    return found
