"""The trainer's side of a weight sync. Speaks vLLM's weight-transfer protocol; imports vLLM only for its GPU
backends.

    client.start_weight_update()     engines pause; their weights are being replaced
    send                             names and shapes once, then the tensors in buckets
    client.finish_weight_update(v)   engines hold version v, drop their caches and resume
    check                            engines must have loaded exactly what was sent

`gloo` broadcasts over TCP and is registered by engine/vllm_transfer.py; `nccl` and `ipc` are vLLM's own.
"""

import datetime
import math
import os
import sys
import traceback
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightSource as VLLMWeightSource

BUCKET_BYTES = 64 << 20
SHARED_BYTES = 512 << 20
"""Of the buffer that processes on one GPU share: each filling of it is a round trip to all engines."""
ALIGNMENT = 64
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the type that shows its bits."""
TIMEOUT = datetime.timedelta(seconds=300)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    name: str
    dtype: str
    """As torch names it: float32."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


class EngineClient(Protocol):
    """The inference engines' control plane, all engines as one. Every call waits for all of them."""

    version: int
    """Label that `finish_weight_update` gives to the weights."""

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Engine i takes the ranks from `init_info["rank_offset"] + i * workers_per_engine` on."""
        ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict | list[dict]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def checksums(self) -> list[int]:
        """What each engine's workers loaded since `start_weight_update`, see `Checksum`."""
        ...


PLACES = 1021
"""Elements are told apart by their place modulo this prime."""
CHUNK_ROWS = 1 << 13
"""Times PLACES: elements that are summed at a time. torch widens them to 64 bits first, 67 MB."""


class Checksum:
    """Sum over named tensors' bits modulo 2^64, in any order of the tensors. A tensor that is missing,
    doubled, renamed or changed shows, and so does one whose elements changed places.

    `add` only queues work on the tensor's device, on the current stream. `value` waits for it, and may be
    read when all streams have been waited for.
    """

    def __init__(self) -> None:
        self.terms: list[Tensor] = []

    @property
    def value(self) -> int:
        return int(torch.stack(self.terms).sum()) % (1 << 64) if self.terms else 0

    def add(self, name: str, tensor: Tensor) -> None:
        bits = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])
        whole = len(bits) - len(bits) % PLACES
        by_place = torch.zeros(PLACES, dtype=torch.int64, device=bits.device)
        for rows in bits[:whole].view(-1, PLACES).split(CHUNK_ROWS):
            by_place += rows.sum(0, dtype=torch.int64)
        by_place[: len(bits) - whole] += bits[whole:]
        places = torch.arange(1, PLACES + 1, device=bits.device)
        odd = 2 * zlib.crc32(name.encode()) + 1  # so that no bit of the sum is lost
        self.terms.append(((by_place * places).sum() + len(bits)) * odd)


class Sendable(Protocol):
    """A model in training, on every rank: DeepSpeedEngine says what these do."""

    def weights(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]: ...

    def weight_metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]: ...


class WeightSource:
    """A model's weights as the transfer backends want them: metadata, and iteration that every rank joins."""

    def __init__(self, engine: Sendable) -> None:
        self.engine = engine
        self.checksum = Checksum()

    @cached_property
    def tensors(self) -> list[TensorMeta]:
        return [TensorMeta(n, str(dtype)[6:], shape) for n, dtype, shape in self.engine.weight_metadata()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.checksum = Checksum()
        for name, tensor in self.engine.weights(BUCKET_BYTES):
            whole = tensor.contiguous()
            self.checksum.add(name, whole)
            yield name, whole


class Transfer(Protocol):
    def send_weights(self) -> None:
        """The whole round, engines paused and resumed. Every rank calls it."""
        ...


class Rendezvous(NamedTuple):
    """Where a trainer's rank meets the engines' workers."""

    address: str
    port: int
    world_size: int
    """The trainer's rank 0 and all workers."""
    rank: int
    """Of the trainer."""


class WeightSender:
    """One trainer rank's end. Every rank calls `send`; rank 0 talks to the engines."""

    def __init__(
        self,
        engine: Sendable,
        client: EngineClient,
        *,
        backend: str,
        address: str,
        port: int,
        num_workers: int,
        rank: int,
    ) -> None:
        """`num_workers`: vLLM workers over all engines. `address`, `port`: where rank 0 can be reached."""
        self.source, self.client, self.rank = WeightSource(engine), client, rank
        meeting = Rendezvous(address, port, num_workers + 1, rank)
        self.transfer: Transfer = OPEN_TRANSFER[backend](self.source, client, meeting)

    def send(self, version: int) -> None:
        """Raises RuntimeError where an engine loaded something else than what was sent."""
        self.client.version = version
        if torch.cuda.is_available():  # vLLM's NCCL sender reads the weights on streams of its own
            torch.cuda.current_stream().synchronize()
        self.transfer.send_weights()
        if self.rank == 0:
            sent = self.source.checksum.value
            for i, loaded in enumerate(self.client.checksums()):
                if loaded != sent:
                    raise RuntimeError(
                        f"weight sync {version}: inference worker {i} loaded other weights than the trainer "
                        f"sent (checksum {loaded:#x}, expected {sent:#x})"
                    )


class GlooTransfer:
    """Broadcasts packed buckets over a private process group, beside DeepSpeed's own."""

    def __init__(self, source: WeightSource, client: EngineClient, group: dist.ProcessGroup | None) -> None:
        """`group`: None on ranks other than 0."""
        self.source, self.client, self.group = source, client, group

    def send_weights(self) -> None:
        if self.group is None:  # only join the gathers
            for _ in self.source:
                pass
            return
        tensors = self.source.tensors
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as thread:
            update = {"tensors": [[t.name, t.dtype, list(t.shape)] for t in tensors]}
            received = thread.submit(self.client.update_weights, update)
            stream = iter(self.source)
            for bucket in plan_buckets(tensors):
                buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
                for meta, view in bucket.views(buffer):
                    name, tensor = next(stream)
                    assert name == meta.name, (name, meta.name)
                    view.copy_(tensor)
                broadcast(self.group, buffer)
            for _ in stream:  # lets the source leave its last gather
                raise AssertionError("more weights than the metadata announced")
            received.result()
        self.client.finish_weight_update()


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together, and where each lies in the buffer."""

    tensors: tuple[TensorMeta, ...]

    @property
    def num_bytes(self) -> int:
        return sum(_aligned(t.num_bytes) for t in self.tensors)

    def views(self, buffer: Tensor) -> Iterator[tuple[TensorMeta, Tensor]]:
        offset = 0
        for t in self.tensors:
            yield t, buffer[offset : offset + t.num_bytes].view(getattr(torch, t.dtype)).view(t.shape)
            offset += _aligned(t.num_bytes)


def plan_buckets(tensors: list[TensorMeta], capacity: int = BUCKET_BYTES) -> list[Bucket]:
    """In order, each at most `capacity` bytes unless a single tensor is larger. Both sides compute the same
    plan."""
    buckets: list[list[TensorMeta]] = [[]]
    size = 0
    for t in tensors:
        if buckets[-1] and size + _aligned(t.num_bytes) > capacity:
            buckets.append([])
            size = 0
        buckets[-1].append(t)
        size += _aligned(t.num_bytes)
    return [Bucket(tuple(b)) for b in buckets if b]


def gloo_group(address: str, port: int, rank: int, world_size: int) -> dist.ProcessGroup:
    """A process group that leaves the default one alone."""
    store = dist.TCPStore(
        address, port, world_size, is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT
    )
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs do not know its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = TIMEOUT
    return gloo(store, rank, world_size, options)


def broadcast(group: dist.ProcessGroup, tensor: Tensor) -> None:
    """From rank 0 of a private group."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def _open_gloo(source: WeightSource, client: EngineClient, meeting: Rendezvous) -> Transfer:
    address, port, world_size, rank = meeting
    if rank != 0:
        return GlooTransfer(source, client, None)
    with ThreadPoolExecutor(1) as thread:  # the engines block until rank 0 joins
        joined = thread.submit(
            client.init_weight_transfer_engine,
            {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size},
        )
        group = gloo_group(address, port, 0, world_size)
        joined.result()
    return GlooTransfer(source, client, group)


def _open_nccl(source: WeightSource, client: EngineClient, meeting: Rendezvous) -> Transfer:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    # Both sides hold two buckets, beside an engine's KV cache. A tensor that exceeds one goes alone.
    warnings.filterwarnings("ignore", message="Tensor .* exceeds buffer_size_bytes")
    info = NCCLTrainerInitInfo(
        meeting.address,
        meeting.port,
        meeting.world_size,
        rank=meeting.rank,
        packed_buffer_size_bytes=BUCKET_BYTES,
    )
    return WeightTransferTrainerFactory.trainer_init(
        info, client=_EndsWithEngines(client), source=_vllm_source(source)
    )


class _EndsWithEngines:
    """The control plane of a sender that waits in NCCL for all engines. Where one fails nothing could wake
    it: the process says why, and ends."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.client.start_weight_update()

    def update_weights(self, update_info: dict | list[dict]) -> None:
        try:
            self.client.update_weights(update_info)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.client.finish_weight_update(weight_version)


def _open_ipc(source: WeightSource, client: EngineClient, meeting: Rendezvous) -> Transfer:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    size = shared_buffer_bytes(source.tensors)
    info = IPCTrainerInitInfo(rank=meeting.rank, packed=True, packed_buffer_size_bytes=size)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=_vllm_source(source))


def shared_buffer_bytes(tensors: list[TensorMeta]) -> int:
    """Of the buffer through which `tensors` go to engines on the same GPU. vLLM takes none that exceeds
    it."""
    sizes = [t.num_bytes for t in tensors]
    return max(*sizes, min(sum(sizes), SHARED_BYTES))


OPEN_TRANSFER = {"gloo": _open_gloo, "nccl": _open_nccl, "ipc": _open_ipc}


def _vllm_source(source: WeightSource) -> "VLLMWeightSource":
    """The same source as a subclass of vLLM's."""
    from vllm.distributed.weight_transfer.base import ParamMeta
    from vllm.distributed.weight_transfer.base import WeightSource as VLLMWeightSource

    class Source(VLLMWeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(t.name, getattr(torch, t.dtype), t.shape) for t in source.tensors]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(source)

    return Source()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
