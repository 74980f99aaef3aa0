import itertools
import os
import pickle
import threading
import time
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor

from openrlhf.backends.distributed import free_port
from openrlhf.backends.vllm.weight_receiver import WorkerExtension
from openrlhf.backends.weight_sync import checksum as checksums
from openrlhf.backends.weight_sync import gloo
from openrlhf.backends.weight_sync.buckets import (
    ALIGNMENT,
    Bucket,
    TensorMeta,
    max_bucket_bytes,
    plan_buckets,
)
from openrlhf.backends.weight_sync.checksum import CPU_CHUNK_ROWS, PLACES, Checksum
from openrlhf.backends.weight_sync.client import EnginesFailedError
from openrlhf.backends.weight_sync.gloo import Connection
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.backends.weight_sync.shared_memory import SharedMemory, open_memory
from openrlhf.backends.weight_sync.source import WeightSource
from openrlhf.backends.weight_sync.stored_weights import WeightFingerprint
from openrlhf.errors import ErrorCode

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "uint8")
METAS = st.lists(
    st.builds(
        TensorMeta,
        name=st.text("abc.", min_size=1, max_size=5),
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    ),
    max_size=30,
)


def tensor_of(meta: TensorMeta, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(meta.shape, generator=random) * 50).abs().to(getattr(torch, meta.dtype))


def test_bytes_of_a_tensor():
    assert TensorMeta("a", "bfloat16", (3, 5)).num_bytes == 30
    assert TensorMeta("a", "float32", ()).num_bytes == 4


def test_buckets_by_hand():
    tensors = [TensorMeta(n, "uint8", (size,)) for n, size in (("a", 64), ("b", 1), ("c", 65), ("d", 300))]
    # 64 and 64 fill a bucket of 128; c takes 128 alone; d is larger than any bucket
    assert [[t.name for t in b.tensors] for b in plan_buckets(tensors, 128)] == [["a", "b"], ["c"], ["d"]]
    assert [b.num_bytes for b in plan_buckets(tensors, 128)] == [128, 128, 320]
    assert [len(b.tensors) for b in plan_buckets([TensorMeta("a", "uint8", (64,))] * 5, 128)] == [2, 2, 1]
    assert plan_buckets([], 128) == []


@given(METAS, st.integers(1, 2000))
def test_buckets_keep_order_and_capacity(tensors, capacity):
    buckets = plan_buckets(tensors, capacity)
    assert [t for b in buckets for t in b.tensors] == tensors
    assert all(b.tensors for b in buckets)
    assert all(b.num_bytes <= capacity for b in buckets if len(b.tensors) > 1)
    # none could have been joined with the next
    for one, two in itertools.pairwise(buckets):
        assert one.num_bytes + Bucket(two.tensors[:1]).num_bytes > capacity


@given(METAS)
def test_views_give_back_what_was_put_in(tensors):
    bucket = Bucket(tuple(tensors))
    buffer = torch.full((bucket.num_bytes,), 0xAB, dtype=torch.uint8)
    sent = [tensor_of(meta, seed) for seed, meta in enumerate(tensors)]
    for tensor, (_, view) in zip(sent, bucket.views(buffer), strict=True):
        view.copy_(tensor)
    for tensor, meta, (received, view) in zip(sent, tensors, bucket.views(buffer.clone()), strict=True):
        assert received == meta
        assert view.dtype == tensor.dtype and torch.equal(view, tensor)
    assert bucket.num_bytes % ALIGNMENT == 0


def checksum(*tensors: tuple[str, Tensor]) -> int:
    total = Checksum()
    for name, tensor in tensors:
        total.add(name, tensor)
    return total.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8])
def test_a_checksum_sees_every_fault(dtype):
    a, b = (torch.arange(1, 8).to(dtype), torch.arange(3, 14).to(dtype))  # odd sizes
    changed = a.clone()
    changed[3] += 1
    right = checksum(("a", a), ("b", b))
    assert right == checksum(("b", b), ("a", a))  # order does not matter
    assert right == checksum(
        ("a", a.clone()), ("b", b.repeat_interleave(2)[::2])
    )  # nor does the memory's layout
    wrong = {
        "missing": checksum(("a", a)),
        "doubled": checksum(("a", a), ("b", b), ("b", b)),
        "renamed": checksum(("a", a), ("c", b)),
        "swapped": checksum(("a", b), ("b", a)),
        "changed": checksum(("a", changed), ("b", b)),
        "nothing": checksum(),
    }
    assert right not in wrong.values(), wrong


def test_a_checksum_by_hand():
    """A word counts as often as its place's number says, its upper half as often as the number in the second
    row of places. The sum and the tensor's size are multiplied by an odd number of the name."""
    words = [3, 7 << 40, 1]
    sums = sum(w * (i + 1) + (w >> 32) * (PLACES + i + 1) for i, w in enumerate(words))
    odd = 2 * zlib.crc32(b"w") + 1
    assert checksum(("w", torch.tensor(words))) == (sums + len(words)) * odd % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_the_uppermost_bits(dtype):
    """The signs of one element, of two that share no place, and of all change it."""
    weight = torch.randn(3 * PLACES * 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = {checksum(("w", weight)), checksum(("w", -weight))}
    for first, second in itertools.product((3, 7, 11), (8 * 5 + 3, 8 * 6 + 3, 8 * 8 + 7)):
        one, two = weight.clone(), weight.clone()
        one[first] *= -1
        two[[first, second]] *= -1
        sums |= {checksum(("w", one)), checksum(("w", two))}
    assert len(sums) == 2 + 3 + 9


def test_a_checksum_is_of_a_part_of_a_memory_too():
    memory = torch.randn(10_000).bfloat16()
    assert checksum(("w", memory[1:])) == checksum(("w", memory[1:].clone()))


def test_a_checksum_sees_a_missing_tensor_of_zeros():
    zeros = torch.zeros(5, dtype=torch.bfloat16)
    assert checksum(("a", zeros)) not in (checksum(), checksum(("a", zeros[:4])))


def test_a_checksum_takes_little_memory():
    """A checksum holds 1 MB at a time."""
    embedding = torch.ones(60_000_007, dtype=torch.bfloat16)  # 120 MB
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        Checksum().add("embed_tokens", embedding)
    assert max(event.cpu_memory_usage for event in profile.function_events) <= 8 * PLACES * CPU_CHUNK_ROWS


def test_a_checksum_waits_for_no_device():
    """A meta tensor has no numbers that a host could wait for."""
    Checksum().add("embed_tokens", torch.empty(152_064, 3584, dtype=torch.bfloat16, device="meta"))


def test_a_checksum_goes_on_from_chunk_to_chunk(monkeypatch):
    weight = torch.randn(50 * PLACES + 3)
    at_once = checksum(("w", weight))
    monkeypatch.setattr(checksums, "CPU_CHUNK_ROWS", 7)
    assert checksum(("w", weight)) == at_once


@given(st.permutations(range(6)))
def test_a_checksum_does_not_depend_on_the_order(order):
    named = [(f"layer.{i}", tensor_of(TensorMeta("", "bfloat16", (i, 3)), i)) for i in range(6)]
    assert checksum(*named) == checksum(*(named[i] for i in order))


class Weights:
    """Trainer's engine, as a sender sees it."""

    def __init__(self, tensors: dict[str, Tensor], adapter: dict[str, Tensor] | None = None) -> None:
        self.tensors, self.parts = tensors, {"merged": tensors, "base": tensors, "adapter": adapter or {}}

    def weights(self, bucket_bytes: int, part: str = "merged") -> Iterator[tuple[str, Tensor]]:
        yield from self.parts[part].items()

    def weight_metadata(self, part: str = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, t.dtype, tuple(t.shape)) for name, t in self.parts[part].items()]


UNSEEN = ["/proc/0/fd/0", "openrlhf-0"]
"""The address of memory of another machine."""


class Receivers:
    """Inference engines in threads, and their control plane. They speak the protocol of vLLM's workers."""

    version = 0
    ends_with_first = False

    def __init__(self, count: int, workers: int = 1) -> None:
        self.num_engines, self.workers_per_engine = count, workers
        self.calls: list[str] = []
        self.connections: dict[int, Connection] = {}
        self.apart: set[int] = set()
        """Workers that cannot see the trainer's memory."""
        self.failures: dict[int, str] = {}
        self.dead: set[int] = set()
        self.loaded: list[dict[str, Tensor]] = [{} for _ in range(count * workers)]
        self.damage = lambda engine, name, tensor: tensor

    def init_weight_transfer_engine(self, info: dict) -> None:
        self.calls.append("init")
        if not info:  # without information they are handed everything
            return
        meeting, size = (info["master_address"], info["master_port"]), self.workers_per_engine

        def join(worker: int) -> None:
            name = str(info["rank_offset"] + worker // size * size)
            place = {"name": name, "rank": 1 + worker % size, "world_size": 1 + size}
            memory = UNSEEN if worker in self.apart else info["memory"]
            self.connections[worker] = Connection(*meeting, **place, memory=memory)

        self._all(join)

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.loaded = [{} for _ in self.loaded]

    def update_weights(self, update_info: dict) -> None:
        self.calls.append("update")
        metas = [TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in update_info["tensors"]]

        def receive(worker: int) -> None:
            engine = worker // self.workers_per_engine
            try:
                for bucket, buffer in self._received(worker, metas, update_info):
                    for meta, view in bucket.views(buffer):
                        self.loaded[worker][meta.name] = self.damage(engine, meta.name, view)
            except RuntimeError as error:
                if worker in self.connections:
                    self.connections.pop(worker).close()
                self.failures[engine] = str(error)

        self._all(receive)

    def _received(
        self, worker: int, metas: list[TensorMeta], update: dict
    ) -> Iterator[tuple[Bucket, Tensor]]:
        if "data" in update:
            yield Bucket(tuple(metas)), torch.frombuffer(bytearray(update["data"]), dtype=torch.uint8)
            return
        yield from self.connections[worker].received(plan_buckets(metas, update["bucket_bytes"]))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {self.version}")

    def checksums(self) -> dict[int, list[int]]:
        sums, size = [checksum(*loaded.items()) for loaded in self.loaded], self.workers_per_engine
        living = [i for i in range(self.num_engines) if i not in self.failures]
        return {i: sums[i * size : (i + 1) * size] for i in living}

    def _all(self, work) -> None:
        """Calls the workers of engines that have not failed."""
        workers = [i for i in range(len(self.loaded)) if i // self.workers_per_engine not in self.failures]
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def sender_of(
    weights: Weights, receivers: Receivers, rank: int = 0, backend: str = "gloo", **options
) -> WeightSender:
    """`backend`: "tcp" is gloo between machines that share no memory."""
    meeting = {"address": "127.0.0.1", "port": free_port(), "rank": rank}
    if backend == "tcp":
        backend, receivers.apart = "gloo", {*range(len(receivers.loaded))}
    return WeightSender(weights, receivers, backend=backend, **meeting, **options)


BACKENDS = pytest.mark.parametrize("backend", ["gloo", "tcp", "ray"])


@BACKENDS
@pytest.mark.parametrize(("engines", "workers"), [(1, 1), (2, 1), (2, 2)])
def test_exactly_the_tensors_are_delivered(engines, workers, backend):
    weights = Weights(
        {
            "embed": torch.randn(100, 7).bfloat16(),
            "norm": torch.ones(3),
            "scalar": torch.tensor(2.5),
            "strided": torch.randn(6, 4).t(),
            "large": torch.randn(1 << 14, 20),  # 1.3 MB: more than a bucket
            "last": torch.randn(5).half(),
        }
    )
    receivers = Receivers(engines, workers)
    sender = sender_of(weights, receivers, backend=backend, bucket_bytes=1 << 20)
    sender.send(1)
    for loaded in receivers.loaded:
        assert list(loaded) == list(weights.tensors)
        for name, tensor in weights.tensors.items():
            assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    weights.tensors["norm"] += 1
    sender.send(2)
    assert all(torch.equal(loaded["norm"], torch.full((3,), 2.0)) for loaded in receivers.loaded)
    # There are three buckets: what comes before the large tensor, it, and what comes after it.
    update = ["start", *["update"] * (3 if backend == "ray" else 1)]
    assert receivers.calls == ["init", *update, "finish 1", *update, "finish 2"]


@BACKENDS
def test_an_engine_that_loads_something_else_is_an_error(backend):
    receivers = Receivers(2)
    sender = sender_of(Weights({"a": torch.ones(3), "b": torch.ones(4)}), receivers, backend=backend)
    receivers.damage = lambda engine, name, tensor: tensor * 2 if (engine, name) == (1, "b") else tensor
    with refused(ErrorCode.ENGINE_FAILED) as refusal:
        sender.send(7)
    first, second = refusal.value.text.splitlines()
    assert first.startswith("weight sync 7 ") and first.endswith(": 0")
    assert "engine 1: worker 0 " in second


@pytest.mark.processes
@BACKENDS
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 8}, {*range(9)}])
def test_an_engine_that_fails_leaves_the_others_whole(failing, backend):
    """The engine fails in the second of four buckets. The first and the last engine do not wait for it, nor
    does one that shares a thread with it."""
    weights = Weights({name: torch.full((1 << 18,), i + 0.5) for i, name in enumerate("abcd")})  # 1 MiB each
    receivers = Receivers(9)
    sender = sender_of(weights, receivers, backend=backend, bucket_bytes=1 << 20)

    def damage(engine, name, tensor):
        if engine in failing and name == "b":
            raise RuntimeError("no such weight")
        return tensor

    receivers.damage = damage
    started = time.monotonic()
    with pytest.raises(EnginesFailedError) as told:
        sender.send(1)
    assert time.monotonic() - started < 10
    assert told.value.failures == dict.fromkeys(failing, "no such weight")
    for engine in {*range(9)} - failing:
        assert receivers.loaded[engine].keys() == weights.tensors.keys()
        assert all(torch.equal(receivers.loaded[engine][name], t) for name, t in weights.tensors.items())
    working = ", ".join(str(i) for i in range(9) if i not in failing)
    assert str(told.value).splitlines()[0].endswith(f"engines with version 1: {working or 'none'}")
    copied = pickle.loads(pickle.dumps(told.value))  # Ray hands it to the trainer in this form
    assert str(copied) == str(told.value) and copied.failures == told.value.failures


@BACKENDS
def test_adapters_travel_alone_once_what_lies_below_them_has_arrived(backend):
    adapter = {"layer.lora_A.weight": torch.ones(2, 3), "layer.lora_B.weight": torch.zeros(4, 2)}
    weights, receivers = Weights({"layer.weight": torch.randn(4, 3)}, adapter), Receivers(1)
    sender = sender_of(weights, receivers, backend=backend, lora_sync="adapter")
    sender.send(1)
    assert receivers.loaded[0].keys() == weights.tensors.keys() | adapter.keys()
    adapter["layer.lora_B.weight"] += 1
    sender.send(2)
    assert receivers.loaded[0].keys() == adapter.keys()
    assert receivers.loaded[0]["layer.lora_B.weight"].eq(1).all()


@pytest.mark.parametrize(
    ("lora_sync", "whole", "parts"),
    [("merged", "merged", ("merged",)), ("adapter", "base", ("base", "adapter"))],
)
def test_engines_store_merged_weights_or_those_below_the_adapter(lora_sync, whole, parts):
    source = WeightSource(Weights({}), lora_sync)
    assert (source.whole_part, source.parts) == (whole, parts)


def test_an_engine_that_was_dropped_is_sent_nothing_more():
    transfer = gloo.GlooTransfer(None, None, {0: "first", 1: "second"}, bucket_bytes=64)
    transfer._drop([1, 5])
    assert transfer.groups == {0: "first"}


def test_sketches_of_a_worker_are_those_of_its_weights():
    """Matrices of layers that vLLM does not know cannot be read back."""
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(5), "other": torch.nn.Linear(5, 2)})
    worker = SimpleNamespace(weight_transfer_engine=SimpleNamespace(model=model))
    lengths = {"norm.weight": 5, "norm.bias": 4, "other.weight": 2, "other.bias": 2, "gone.weight": 5}
    found = WorkerExtension.layer_fingerprints(worker, lengths)
    known = {"norm.weight": model["norm"].weight, "other.bias": model["other"].bias}
    assert found == {name: tuple(WeightFingerprint.of(weight)) for name, weight in known.items()}


@pytest.mark.processes
@pytest.mark.parametrize(("asked", "expected"), [(None, 7), (40 << 20, 3), (1 << 20, 100)])
def test_weights_travel_in_buckets_of_the_size_that_was_asked_for(asked, expected):
    weights = Weights({str(i): torch.zeros(1 << 18) for i in range(100)})  # 1 MiB each
    receivers = Receivers(1)
    sender = sender_of(weights, receivers, bucket_bytes=asked)
    with patch.object(gloo.GlooTransfer, "_send", autospec=True, side_effect=gloo.GlooTransfer._send) as sent:
        sender.send(1)
    assert sent.call_count == expected and len(receivers.loaded[0]) == 100


def test_engines_on_other_machines_receive_beside_those_that_share_memory():
    """Both workers of an engine receive over TCP if one of them cannot see the memory."""
    weights = Weights({name: torch.randn(1 << 18) for name in "abcd"})  # 1 MiB each
    receivers = Receivers(3, workers=2)
    receivers.apart = {2, 3, 5}
    sender = sender_of(weights, receivers, bucket_bytes=1 << 20)
    assert {i for i, c in receivers.connections.items() if c.memory is not None} == {0, 1}
    for version in (1, 2):
        weights.tensors["c"] += version
        sender.send(version)
        for loaded in receivers.loaded:
            assert all(torch.equal(loaded[name], t) for name, t in weights.tensors.items())


def test_a_worker_that_should_share_memory_and_cannot_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gloo, "_address_towards", lambda host, port: "10.0.0.1")
    here, there = (SimpleNamespace(host=f"10.0.0.{i}", port=1) for i in (1, 2))
    assert gloo._opened(["/no/such/memory", "memory"], there) is None and capsys.readouterr().err == ""
    assert gloo._opened(["/no/such/memory", "memory"], here) is None
    assert "using TCP instead of memory shared with the trainer" in capsys.readouterr().err


def test_shared_buffers_are_not_filled_before_they_were_read(monkeypatch):
    weights = Weights({str(i): torch.full((1 << 10,), float(i)) for i in range(12)})
    receivers = Receivers(2)
    sender = sender_of(weights, receivers, bucket_bytes=1 << 12)
    clone = Tensor.clone

    def slow(tensor: Tensor) -> Tensor:
        time.sleep(0.02)
        return clone(tensor)

    monkeypatch.setattr(Tensor, "clone", slow)
    sender.send(1)  # compares checksums


def test_shared_memory_can_be_opened_until_it_is_closed():
    """Open memory stays open. It has no name in a file system, which could remain after a crash."""
    memory = SharedMemory(1 << 20)
    same, address = open_memory(memory.address), memory.address
    memory.tensor[7] = 5
    assert same[7] == 5 and len(same) == 1 << 20
    assert "(deleted)" in os.readlink(address[0])
    memory.close()
    memory.tensor[8] = 6
    assert same[8] == 6
    with pytest.raises(OSError):
        open_memory(address)


def test_shared_memory_is_not_mistaken_for_another_file(tmp_path):
    (tmp_path / "a").write_bytes(b"a" * 100)
    with pytest.raises(FileNotFoundError):
        open_memory([str(tmp_path / "a"), "openrlhf-0"])


@pytest.mark.parametrize(
    ("sizes", "capacity", "expected"),
    [
        ((64, 64), 1000, 128),
        ((64, 300), 100, 320),  # vLLM takes no tensor that exceeds the buffer
        ((100 << 20,) * 20, 512 << 20, 512 << 20),
    ],
)
def test_size_of_a_shared_buffer(sizes, capacity, expected):
    tensors = [TensorMeta(str(i), "uint8", (size,)) for i, size in enumerate(sizes)]
    assert max_bucket_bytes(tensors, capacity) == expected
    assert max_bucket_bytes([], capacity) == 0


@pytest.mark.processes
@given(METAS, st.integers(1, 2000))
def test_no_bucket_exceeds_a_shared_buffer(tensors, capacity):
    size = max_bucket_bytes(tensors, capacity)
    assert all(b.num_bytes <= size for b in plan_buckets(tensors[1:], capacity))


def test_connections_to_many_engines_share_threads():
    """Each engine has one connection; rank 0 has eight for all of them."""
    receivers = Receivers(12)
    with patch.object(gloo, "_gloo_device", wraps=gloo._gloo_device) as devices:
        sender = sender_of(Weights({"a": torch.arange(5.0)}), receivers)
    assert devices.call_count == 12 + 8
    sender.send(1)
    assert all(torch.equal(loaded["a"], torch.arange(5.0)) for loaded in receivers.loaded)


def test_other_ranks_only_join_the_gathers():
    visited = []

    class Gathering(Weights):
        def weights(self, bucket_bytes, part="merged"):
            for name, tensor in super().weights(bucket_bytes, part):
                visited.append(name)
                yield name, tensor

    receivers = Receivers(1)
    sender_of(Gathering({"a": torch.ones(3), "b": torch.ones(4)}), receivers, rank=1).send(1)
    assert visited == ["a", "b"] and receivers.calls == []


def test_checksum_shows_elements_that_changed_places():
    def checksum(tensor):
        total = Checksum()
        total.add("w", tensor)
        return total.value

    weight = torch.randn(64, 48)
    assert checksum(weight) == checksum(weight.clone())
    assert checksum(weight) != checksum(weight.T)
    assert checksum(weight) != checksum(
        weight[torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    )
