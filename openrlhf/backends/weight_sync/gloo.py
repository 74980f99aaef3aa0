"""Transfers weights on CPUs. Engines on the trainer's machine read buckets from shared memory; other engines
receive them as a broadcast over TCP. Trainer and engines synchronise in private gloo process groups."""

import datetime
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.backends.weight_sync.buckets import Bucket, as_json, max_bucket_bytes
from openrlhf.backends.weight_sync.client import EngineClient, Rendezvous, Transfer
from openrlhf.backends.weight_sync.shared_memory import SharedMemory, open_memory
from openrlhf.backends.weight_sync.source import WeightSource, buffers, filled_buckets

SENDING_THREADS = 8
"""Maximum number of threads with which rank 0 sends. Connections to engines share them."""
TIMEOUT = datetime.timedelta(seconds=300)


class GlooTransfer:
    """Sends buckets over one private process group per engine, so that no engine waits for another one that
    has failed."""

    def __init__(
        self,
        source: WeightSource,
        client: EngineClient,
        groups: Mapping[int, dist.ProcessGroup],
        bucket_bytes: int,
        memory: Tensor | None = None,
        sharing: Set[int] = frozenset(),
    ) -> None:
        """`groups`: engine index -> process group; empty on ranks other than 0. `memory`: two buffers,
        (2, bytes) uint8, which the engines in `sharing` have mapped."""
        self.source, self.client, self.groups = source, client, dict(groups)
        self.bucket_bytes, self.memory, self.sharing = bucket_bytes, memory, sharing
        self.in_flight: dict[int, dist.Work] = {}

    def send_weights(self) -> None:
        if not self.groups:  # this rank only takes part in gathering weights
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        self._drop(self.client.failures)
        with ThreadPoolExecutor(1) as thread:
            update = {"tensors": as_json(self.source.tensors), "bucket_bytes": self.bucket_bytes}
            received = thread.submit(self.client.update_weights, update)
            for _, buffer in filled_buckets(self.source, self.bucket_bytes, self.memory):
                self._wait_for_receivers(self.in_flight)
                self.in_flight = {i: self._send(i, buffer) for i in self.groups}
                self._wait_for_receivers(self.sharing)  # until they have read the buffer that is filled next
            self._wait_for_receivers(self.in_flight)
            received.result()  # bounded: the engines' `timeout`
        self.client.finish_weight_update()

    def _send(self, engine: int, buffer: Tensor) -> dist.Work:
        """Starts sending a bucket. For an engine with shared memory it is a barrier, which shows that the
        bucket is complete and that the engine has read the previous one."""
        group = self.groups[engine]
        return group.barrier() if engine in self.sharing else broadcast(group, buffer)

    def _wait_for_receivers(self, engines: Iterable[int]) -> None:
        """Waits for the transfers of the last bucket to these engines. Drops the group of an engine whose
        connection broke because it died or failed."""
        for i in self.in_flight.keys() & set(engines):
            try:
                self.in_flight.pop(i).wait()  # bounded: timeout of the group
            except RuntimeError as error:
                self._drop([i])
                print(f"weight sync: the connection to inference engine {i} broke: {error}", file=sys.stderr)

    def _drop(self, engines: Iterable[int]) -> None:
        for i in engines:
            self.groups.pop(i, None)


class Connection:
    """The connection of an engine's worker to the trainer's rank 0."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        name: str,
        rank: int,
        world_size: int,
        memory: list[str],
    ) -> None:
        """`name`: name of the process group in the store of rank 0, which all groups share; `rank`: the
        worker's rank in this group, from 1; `memory`: `SharedMemory.address` of the trainer's buffers."""
        store = _store(address, port, is_master=False)
        found = _opened(memory, store)
        self.group = _gloo_group(store, name, rank, world_size, _gloo_device(store))
        self.memory = found if _all_have(self.group, found is not None) else None

    def received(self, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
        """Yields (bucket, buffer). The buffer belongs to the caller. While the caller loads a bucket, the
        next one is transferred."""
        return self._broadcast(buckets) if self.memory is None else self._shared(buckets, self.memory)

    def close(self) -> None:
        """Ends the connection, so that the trainer does not wait for this worker."""
        del self.group

    def _shared(self, buckets: Sequence[Bucket], memory: Tensor) -> Iterator[tuple[Bucket, Tensor]]:
        for bucket, buffer in zip(buckets, buffers(memory.view(2, -1), buckets), strict=True):
            self.group.barrier().wait()  # bounded: timeout of the group
            yield bucket, buffer.clone()

    def _broadcast(self, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
        in_flight: list[tuple[Bucket, Tensor, dist.Work]] = []
        for bucket in buckets:
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            in_flight.append((bucket, buffer, broadcast(self.group, buffer)))
            if len(in_flight) == 2:
                yield _arrived(*in_flight.pop(0))
        for last in in_flight:
            yield _arrived(*last)


def _arrived(bucket: Bucket, buffer: Tensor, work: dist.Work) -> tuple[Bucket, Tensor]:
    work.wait()  # bounded: timeout of the group
    return bucket, buffer


def _opened(memory: list[str], store: dist.TCPStore) -> Tensor | None:
    """Maps the trainer's memory. Returns None if that is impossible, and prints the reason if the trainer
    seems to be on this machine (it has the same network address)."""
    try:
        return open_memory(memory)
    except OSError as error:
        if _address_towards(store.host, store.port) == store.host:
            text = (
                f"weight sync: using TCP instead of memory shared with the trainer, which is slower: {error}"
            )
            print(text, file=sys.stderr)
        return None


def _all_have(group: dist.ProcessGroup, mine: bool) -> bool:
    """Returns True if `mine` is True for all members of the group. Collective."""
    answer = torch.tensor([mine], dtype=torch.uint8)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    group.allreduce([answer], options).wait()  # bounded: timeout of the group
    return bool(answer)


def broadcast(group: dist.ProcessGroup, tensor: Tensor) -> dist.Work:
    """Starts a broadcast from rank 0 of a private group."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)


def _gloo_device(store: dist.TCPStore) -> Any:
    """Creates a gloo device, a thread that transfers data for any number of groups."""
    return dist.ProcessGroupGloo.create_device(hostname=_address_towards(store.host, store.port))


def _gloo_group(
    store: dist.TCPStore, name: str, rank: int, world_size: int, device: Any
) -> dist.ProcessGroup:
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options
    options = gloo._Options()
    options._devices, options._timeout = [device], TIMEOUT
    options._threads = 1  # buckets are sent one after the other
    return gloo(dist.PrefixStore(name, store), rank, world_size, options)


def _store(address: str, port: int, *, is_master: bool) -> dist.TCPStore:
    return dist.TCPStore(address, port, is_master=is_master, wait_for_workers=False, timeout=TIMEOUT)


def _address_towards(address: str, port: int) -> str:
    """Returns this machine's address on the route to `address`. Sends no data."""
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def open_gloo(source: WeightSource, client: EngineClient, meeting: Rendezvous) -> Transfer:
    if meeting.rank != 0:
        return GlooTransfer(source, client, {}, meeting.bucket_bytes)
    store = _store(meeting.address, meeting.port, is_master=True)
    size = client.workers_per_engine
    info = {"master_address": meeting.address, "master_port": meeting.port, "rank_offset": 1}
    buffers_bytes = 2 * max_bucket_bytes(source.tensors, meeting.bucket_bytes)
    client.ends_with_first = True
    # The engines block until rank 0 joins.
    with closing(SharedMemory(buffers_bytes)) as memory, ThreadPoolExecutor(1) as thread:
        joined = thread.submit(client.init_weight_transfer_engine, info | {"memory": memory.address})
        devices = [_gloo_device(store) for _ in range(min(client.num_engines, SENDING_THREADS))]
        groups = {
            i: _gloo_group(store, str(1 + i * size), 0, 1 + size, devices[i % len(devices)])
            for i in range(client.num_engines)
        }
        sharing = {i for i, group in groups.items() if _all_have(group, True)}
        joined.result()  # bounded: the engines' `timeout`
    client.ends_with_first = False
    return GlooTransfer(source, client, groups, meeting.bucket_bytes, memory.tensor.view(2, -1), sharing)
