"""Weight transfer over TCP: buckets are broadcast with gloo in private process groups."""

import datetime
import socket
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch import Tensor

from openrlhf.backends.weight_sync.buckets import as_json
from openrlhf.backends.weight_sync.client import EngineClient, Rendezvous, Transfer
from openrlhf.backends.weight_sync.source import WeightSource, filled_buckets

SENDING_THREADS = 8
"""Maximum number of threads with which rank 0 sends. Connections to engines share them."""
TIMEOUT = datetime.timedelta(seconds=300)


class GlooTransfer:
    """Broadcasts buckets over one private process group per engine, so that no engine waits for another one
    that has failed."""

    def __init__(
        self,
        source: WeightSource,
        client: EngineClient,
        groups: Mapping[int, dist.ProcessGroup],
        bucket_bytes: int,
    ) -> None:
        """`groups`: engine index -> process group; empty on ranks other than 0."""
        self.source, self.client, self.groups = source, client, dict(groups)
        self.bucket_bytes = bucket_bytes
        self.in_flight: dict[int, dist.Work] = {}

    def send_weights(self) -> None:
        if not self.groups:  # takes part in the gathers only
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        self._drop(self.client.failures)
        with ThreadPoolExecutor(1) as thread:
            update = {"tensors": as_json(self.source.tensors), "bucket_bytes": self.bucket_bytes}
            received = thread.submit(self.client.update_weights, update)
            for _, buffer in filled_buckets(self.source, self.bucket_bytes):
                self._wait_for_receivers()
                self.in_flight = {i: broadcast(group, buffer) for i, group in self.groups.items()}
            self._wait_for_receivers()
            received.result()  # bounded: the engines' `timeout`
        self.client.finish_weight_update()

    def _wait_for_receivers(self) -> None:
        """Waits until the engines have received the last bucket. Drops the group of an engine whose
        connection broke, because it died or failed."""
        for i, work in self.in_flight.items():
            try:
                work.wait()  # bounded: timeout of the group
            except RuntimeError as error:
                self._drop([i])
                print(f"weight sync: the connection to inference engine {i} broke: {error}", file=sys.stderr)
        self.in_flight = {}

    def _drop(self, engines: Iterable[int]) -> None:
        for i in engines:
            self.groups.pop(i, None)


def gloo_group(address: str, port: int, name: str, rank: int, world_size: int) -> dist.ProcessGroup:
    """Creates a private process group. All groups of a trainer use the store of its rank 0, under different
    `name`s."""
    store = _store(address, port, is_master=False)
    return _gloo_group(store, name, rank, world_size, _gloo_device(store))


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
        joined.result()  # bounded: the engines' `timeout`
    client.ends_with_first = False
    return GlooTransfer(source, client, groups, meeting.bucket_bytes)
