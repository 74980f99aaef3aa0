"""Arrays and samples that grow beyond memory."""

import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from refusals import refused

from openrlhf.data import growing
from openrlhf.data.growing import GrowingArray
from openrlhf.data.store import SampleStore
from openrlhf.errors import ErrorCode


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("in_memory", [0, 40, 10**6])
def test_what_was_appended_is_there(monkeypatch, cache, in_memory):
    monkeypatch.setattr(growing, "IN_MEMORY", in_memory)
    numbers = GrowingArray("i")
    for start in range(0, 100, 7):
        numbers.extend(range(start, start + 7))
    assert len(numbers) == 105
    whole = numbers.whole()
    assert whole.dtype == np.int32 and whole.tolist() == list(range(105))
    assert isinstance(whole, np.memmap) == (in_memory < 420)
    assert not cache.exists() or not [*cache.iterdir()]  # the file has no name
    assert GrowingArray("b").whole().tolist() == []


def test_memory_stays_bounded(monkeypatch):
    monkeypatch.setattr(growing, "IN_MEMORY", 2**16)
    tracemalloc.start()
    numbers, block = GrowingArray("i"), list(range(1000))
    for _ in range(2000):
        numbers.extend(block)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert numbers.whole().nbytes == 8_000_000 > 20 * peak


def test_a_store_on_disk_is_the_one_in_memory(monkeypatch):
    stores = []
    for in_memory in (10**6, 0):
        monkeypatch.setattr(growing, "IN_MEMORY", in_memory)
        store = SampleStore()
        for i in range(1, 6):
            store.append(range(i), [token % 2 == 0 for token in range(i)])
        stores += [store, pickle.loads(pickle.dumps(store))]
    for store in stores:
        assert [sample.token_ids.tolist() for sample in map(store.__getitem__, range(5))] == [
            list(range(i)) for i in range(1, 6)
        ]
        assert torch.equal(store[4].action_mask, torch.tensor([True, False, True, False, True]))
        for name, array in stores[0].arrays().items():
            np.testing.assert_array_equal(store.arrays()[name], array)


def test_a_full_disk_names_the_folder(monkeypatch, cache):
    monkeypatch.setattr(growing, "IN_MEMORY", 0)
    cache.write_text("a file")
    with refused(ErrorCode.NOT_WRITABLE, told=(str(cache), "OPENRLHF_CACHE")):
        GrowingArray("i").extend([1])
