"""The trainer's side of a weight sync. Speaks vLLM's weight-transfer protocol; imports vLLM only for its GPU
backends.

    client.start_weight_update()     engines pause; their weights are being replaced
    send                             names and shapes once, then the tensors in buckets
    client.finish_weight_update(v)   engines hold version v, drop their caches and resume
    check                            engines must have loaded exactly what was sent

`gloo` broadcasts over TCP and `ray` hands buckets to the control plane; weight_receiver.py registers both.
`nccl` and `ipc` are vLLM's own. With all but `nccl` an engine that fails leaves the others whole: they finish
their update before EnginesFailedError says which it was. All engines of `nccl` are in one group, which ends
with any of them.
"""

import datetime
import math
import os
import socket
import sys
import traceback
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.backends.base import Part
from openrlhf.config.choices import LoraSync

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightSource as VLLMWeightSource

BUCKET_BYTES = {"gloo": 16 << 20, "nccl": 64 << 20, "ipc": 512 << 20, "ray": 64 << 20}
"""Of weights that travel at a time, unless `--vllm.sync_bucket_mb` says otherwise. On a CPU memory of more
than 32 MiB is new to the process each time, which takes longer than to copy it. Of a buffer that processes on
one GPU share each filling is a round trip to all engines, and so is each bucket of Ray's."""
GATHERED_BYTES = 64 << 20
"""Of weights that are made whole at a time."""
ALIGNMENT = 64
SENDING_THREADS = 8
"""Of rank 0 over gloo, at most: connections to engines share them."""
ADAPTER_MARKS = (".lora_A.", ".lora_B.")
"""In the names of an adapter's tensors, and in no checkpoint's of a whole model."""
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
    """The inference engines' control plane, all engines as one. Every call goes to those that have not failed
    and waits for them."""

    version: int
    """Label that `finish_weight_update` gives to the weights."""
    workers_per_engine: int
    failures: dict[int, str]
    """Engines by their number, and what became of them."""
    ends_with_first: bool
    """Raise an engine's error at once, because the others would never answer."""

    @property
    def num_engines(self) -> int: ...

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Engine i takes the ranks from `init_info["rank_offset"] + i * workers_per_engine` on."""
        ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict | list[dict]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def checksums(self) -> dict[int, list[int]]:
        """What each engine's workers loaded since `start_weight_update`, see `Checksum`."""
        ...


class EnginesFailedError(RuntimeError):
    """Engines that failed in a weight sync. Those that did not hold the new version."""

    def __init__(self, version: int, failures: Mapping[int, str], num_engines: int) -> None:
        super().__init__(version, failures, num_engines)
        self.version, self.failures, self.num_engines = version, dict(failures), num_engines

    def __str__(self) -> str:
        whole = [str(i) for i in range(self.num_engines) if i not in self.failures]
        told = "\n".join(f"inference engine {i}: {text}" for i, text in self.failures.items())
        left = f"engines with version {self.version}: {', '.join(whole) or 'none'}"
        return f"weight sync {self.version} failed; {left}\n{told}"


WORD = 8
"""Bytes that are summed as one number."""
PLACES = 1021
"""Words are told apart by their place modulo this prime."""
CHUNK_ROWS, CPU_CHUNK_ROWS = 1 << 13, 1 << 7
"""Times PLACES: words that are summed at a time. 67 MB, so that a GPU is asked rarely; 1 MB, which stays in a
core's cache."""


class Checksum:
    """Sum over named tensors' bits modulo 2^64, in any order of the tensors. A tensor that is missing,
    doubled, renamed or changed shows, and so does one whose elements changed places.

    Bits are summed in words of 64, as fast as memory is read. The upper halves are summed once more: of a
    word times an even number 2^64 would swallow the uppermost bits.

    `add` only queues work on the tensor's device, on the current stream. `value` waits for it, and may be
    read when all streams have been waited for.
    """

    def __init__(self) -> None:
        self.terms: list[Tensor] = []

    @property
    def value(self) -> int:
        return int(torch.stack(self.terms).sum()) % (1 << 64) if self.terms else 0

    def add(self, name: str, tensor: Tensor) -> None:
        by_place = torch.zeros(2, PLACES, dtype=torch.int64, device=tensor.device)
        for rows in _rows_of_words(tensor.detach().contiguous().view(-1).view(torch.uint8)):
            by_place[0] += rows.sum(0)
            by_place[1] += (rows >> 32).sum(0)
        places = torch.arange(1, 2 * PLACES + 1, device=tensor.device).view(2, PLACES)
        odd = 2 * zlib.crc32(name.encode()) + 1  # so that no bit of the sum is lost
        self.terms.append(((by_place * places).sum() + tensor.numel()) * odd)


def _rows_of_words(data: Tensor) -> Iterator[Tensor]:
    """(rows, PLACES) words of bytes at a time; what is missing of the last row is zero."""
    whole = len(data) - len(data) % (WORD * PLACES)
    head, last = data[:whole], data.new_zeros(WORD * PLACES)
    if head.storage_offset() % WORD:
        head = head.clone()
    last[: len(data) - whole] = data[whole:]
    chunk_rows = CPU_CHUNK_ROWS if data.device.type == "cpu" else CHUNK_ROWS
    yield from head.view(torch.int64).view(-1, PLACES).split(chunk_rows)
    yield last.view(torch.int64).view(1, PLACES)


class Sendable(Protocol):
    """A model in training, on every rank: TrainEngine says what these do."""

    def weights(self, bucket_bytes: int, part: Part = "merged") -> Iterator[tuple[str, Tensor]]: ...

    def weight_metadata(self, part: Part = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]: ...


class WeightSource:
    """A model's weights as the transfer backends want them: metadata, and iteration that every rank joins.
    Where adapters go apart, what lies below them is only sent the first time."""

    def __init__(self, engine: Sendable, lora_sync: LoraSync) -> None:
        self.engine = engine
        self.whole_part: Part = "merged" if lora_sync == "merged" else "base"
        """What of the model the layers of engines hold."""
        self.parts: tuple[Part, ...] = ("merged",) if lora_sync == "merged" else ("base", "adapter")
        self.checksum = Checksum()
        self._metadata: dict[Part, list[TensorMeta]] = {}

    @property
    def tensors(self) -> list[TensorMeta]:
        """Of the parts that are next to be sent."""
        return [meta for part in self.parts for meta in self._of_part(part)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.checksum = Checksum()
        for part in self.parts:
            for name, tensor in self.engine.weights(GATHERED_BYTES, part):
                whole = tensor.contiguous()
                self.checksum.add(name, whole)
                yield name, whole

    def were_sent(self) -> None:
        """What changes in training is all that the engines need from now on."""
        self.parts = self.parts[-1:]

    def _of_part(self, part: Part) -> list[TensorMeta]:
        if part not in self._metadata:
            found = self.engine.weight_metadata(part)
            self._metadata[part] = [TensorMeta(n, str(dtype)[6:], shape) for n, dtype, shape in found]
        return self._metadata[part]


class Transfer(Protocol):
    def send_weights(self) -> None:
        """The whole round, engines paused and resumed. Every rank calls it."""
        ...


class Rendezvous(NamedTuple):
    """Where a trainer's rank meets the engines' workers."""

    address: str
    port: int
    rank: int
    """Of the trainer."""
    bucket_bytes: int


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
        rank: int,
        lora_sync: LoraSync = "merged",
        bucket_bytes: int | None = None,
    ) -> None:
        """`address`, `port`: where rank 0 can be reached. `bucket_bytes`: of weights that travel at a
        time."""
        self.source, self.client, self.rank = WeightSource(engine, lora_sync), client, rank
        meeting = Rendezvous(address, port, rank, bucket_bytes or BUCKET_BYTES[backend])
        self.transfer: Transfer = OPEN_TRANSFER[backend](self.source, client, meeting)

    def send(self, version: int) -> None:
        """Raises EnginesFailedError where engines failed, or loaded something else than what was sent, once
        the others hold the new version."""
        self.client.version = version
        if torch.cuda.is_available():  # vLLM's NCCL sender reads the weights on streams of its own
            torch.cuda.current_stream().synchronize()
        self.transfer.send_weights()
        self.source.were_sent()
        if self.rank == 0:
            loaded = self.client.checksums()
            failures = self.client.failures | _differing(loaded, self.source.checksum.value)
            if failures:
                raise EnginesFailedError(version, failures, self.client.num_engines)


def _differing(loaded: Mapping[int, Sequence[int]], sent: int) -> dict[int, str]:
    """What to say of engines with workers that loaded something else."""
    return {
        i: f"worker {worker} loaded other weights than the trainer sent (checksum {checksum:#x}, expected "
        f"{sent:#x})"
        for i, checksums in loaded.items()
        for worker, checksum in enumerate(checksums)
        if checksum != sent
    }


class GlooTransfer:
    """Broadcasts packed buckets over private process groups, beside DeepSpeed's own: one for each engine, so
    that none waits for another that has failed."""

    def __init__(
        self,
        source: WeightSource,
        client: EngineClient,
        groups: Mapping[int, dist.ProcessGroup],
        bucket_bytes: int,
    ) -> None:
        """`groups`: by the number of the engine; none on ranks other than 0."""
        self.source, self.client, self.groups = source, client, dict(groups)
        self.bucket_bytes = bucket_bytes
        self.under_way: dict[int, dist.Work] = {}

    def send_weights(self) -> None:
        if not self.groups:  # only join the gathers
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        self._forget(self.client.failures)
        with ThreadPoolExecutor(1) as thread:
            update = {"tensors": _as_json(self.source.tensors), "bucket_bytes": self.bucket_bytes}
            received = thread.submit(self.client.update_weights, update)
            for _, buffer in filled(self.source, self.bucket_bytes):
                self._arrive()
                self.under_way = {i: broadcast(group, buffer) for i, group in self.groups.items()}
            self._arrive()
            received.result()
        self.client.finish_weight_update()

    def _arrive(self) -> None:
        """The bucket under way has arrived where engines live: a dead one's connection breaks, and so does
        that of one which has failed."""
        for i, work in self.under_way.items():
            try:
                work.wait()
            except RuntimeError as error:
                self._forget([i])
                print(f"weight sync: the connection to inference engine {i} broke: {error}", file=sys.stderr)
        self.under_way = {}

    def _forget(self, engines: Iterable[int]) -> None:
        for i in engines:
            self.groups.pop(i, None)


class RayTransfer:
    """Hands buckets to the engines' control plane, which lays each into Ray's object store once: slow, but
    trainer and engines need no connection of their own."""

    def __init__(self, source: WeightSource, client: EngineClient, meeting: Rendezvous) -> None:
        self.source, self.client, self.meeting = source, client, meeting

    def send_weights(self) -> None:
        if self.meeting.rank != 0:  # only join the gathers
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        for bucket, buffer in filled(self.source, self.meeting.bucket_bytes):
            update = {"tensors": _as_json(bucket.tensors), "data": buffer.numpy().tobytes()}
            self.client.update_weights(update)
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


def plan_buckets(tensors: list[TensorMeta], capacity: int) -> list[Bucket]:
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


def filled(source: WeightSource, capacity: int) -> Iterator[tuple[Bucket, Tensor]]:
    """All weights of `source`, a bucket at a time, whose bytes last until the one after the next."""
    stream, buckets = iter(source), plan_buckets(source.tensors, capacity)
    for bucket, buffer in zip(buckets, _two_buffers(buckets), strict=True):
        for meta, view in bucket.views(buffer):
            name, tensor = next(stream)
            assert name == meta.name, (name, meta.name)
            view.copy_(tensor)
        yield bucket, buffer
    for _ in stream:  # lets the source leave its last gather
        raise AssertionError("more weights than the metadata announced")


def _as_json(tensors: Iterable[TensorMeta]) -> list[list]:
    return [[t.name, t.dtype, list(t.shape)] for t in tensors]


def _two_buffers(buckets: Sequence[Bucket]) -> Iterator[Tensor]:
    """For the next of `buckets`, in turns: one is filled while the other is under way."""
    size = max((bucket.num_bytes for bucket in buckets), default=0)
    memory = cycle(torch.empty(2, size, dtype=torch.uint8))
    return (buffer[: bucket.num_bytes] for bucket, buffer in zip(buckets, memory, strict=False))


def gloo_group(address: str, port: int, name: str, rank: int, world_size: int) -> dist.ProcessGroup:
    """A process group that leaves the default one alone. All groups of a trainer, told apart by `name`, meet
    at the store of its rank 0."""
    store = _store(address, port, is_master=False)
    return _gloo_group(store, name, rank, world_size, _gloo_device(store))


def broadcast(group: dist.ProcessGroup, tensor: Tensor) -> dist.Work:
    """From rank 0 of a private group, under way."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)


def _gloo_device(store: dist.TCPStore) -> Any:
    """A thread that moves the bytes of any number of groups."""
    return dist.ProcessGroupGloo.create_device(hostname=_address_towards(store.host, store.port))


def _gloo_group(
    store: dist.TCPStore, name: str, rank: int, world_size: int, device: Any
) -> dist.ProcessGroup:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs do not know its options
    options = gloo._Options()
    options._devices, options._timeout = [device], TIMEOUT
    options._threads = 1  # that waits: one bucket comes after the other
    return gloo(dist.PrefixStore(name, store), rank, world_size, options)


def _store(address: str, port: int, *, is_master: bool) -> dist.TCPStore:
    return dist.TCPStore(address, port, is_master=is_master, wait_for_workers=False, timeout=TIMEOUT)


def _address_towards(address: str, port: int) -> str:
    """Of this machine, as seen from there. Sends nothing."""
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def _open_gloo(source: WeightSource, client: EngineClient, meeting: Rendezvous) -> Transfer:
    if meeting.rank != 0:
        return GlooTransfer(source, client, {}, meeting.bucket_bytes)
    store = _store(meeting.address, meeting.port, is_master=True)
    info = {"master_address": meeting.address, "master_port": meeting.port, "rank_offset": 1}
    client.ends_with_first = True
    with ThreadPoolExecutor(1) as thread:  # the engines block until rank 0 joins
        joined = thread.submit(client.init_weight_transfer_engine, info)
        size = client.workers_per_engine
        devices = [_gloo_device(store) for _ in range(min(client.num_engines, SENDING_THREADS))]
        groups = {
            i: _gloo_group(store, str(1 + i * size), 0, 1 + size, devices[i % len(devices)])
            for i in range(client.num_engines)
        }
        joined.result()
    client.ends_with_first = False
    return GlooTransfer(source, client, groups, meeting.bucket_bytes)


def _open_ray(source: WeightSource, client: EngineClient, meeting: Rendezvous) -> Transfer:
    if meeting.rank == 0:
        client.init_weight_transfer_engine({})
    return RayTransfer(source, client, meeting)


def _open_nccl(source: WeightSource, client: EngineClient, meeting: Rendezvous) -> Transfer:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    # Both sides hold two buckets, beside an engine's KV cache. A tensor that exceeds one goes alone.
    warnings.filterwarnings("ignore", message="Tensor .* exceeds buffer_size_bytes")
    info = NCCLTrainerInitInfo(
        meeting.address,
        meeting.port,
        1 + client.num_engines * client.workers_per_engine,
        rank=meeting.rank,
        packed_buffer_size_bytes=meeting.bucket_bytes,
    )
    client.ends_with_first = True
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

    size = shared_buffer_bytes(source.tensors, meeting.bucket_bytes)
    info = IPCTrainerInitInfo(rank=meeting.rank, packed=True, packed_buffer_size_bytes=size)
    return _Shareable(
        WeightTransferTrainerFactory.trainer_init(info, client=client, source=_vllm_source(source))
    )


class _Shareable:
    """Sends from memory that another process can open. That of expandable segments it can only where it may
    trace this one, which containers refuse; torch takes none while they are off."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    def send_weights(self) -> None:
        from vllm.device_allocator import alloc_conf

        asked, flag = alloc_conf.alloc_conf_from_env(), alloc_conf.EXPANDABLE_SEGMENTS
        if not alloc_conf.conf_flag_enabled(asked, flag):
            self.transfer.send_weights()
            return
        alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(asked, flag, False))
        try:
            self.transfer.send_weights()
        finally:
            alloc_conf.set_alloc_conf(asked)


def shared_buffer_bytes(tensors: list[TensorMeta], most: int) -> int:
    """Of the buffer through which `tensors` go to engines on the same GPU. vLLM takes none that exceeds
    it."""
    sizes = [t.num_bytes for t in tensors]
    return max(*sizes, min(sum(sizes), most))


OPEN_TRANSFER = {"gloo": _open_gloo, "nccl": _open_nccl, "ipc": _open_ipc, "ray": _open_ray}


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
