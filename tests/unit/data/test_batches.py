from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.data.batches import MiniBatches
from openrlhf.data.store import SampleStore
from openrlhf.rows import PackedRow


def make_dataset(lengths):
    """Makes a dataset whose sample i consists of i's only, so that rows can be read back."""
    dataset = SampleStore()
    for i, length in enumerate(lengths):
        dataset.append([i] * length, [False] + [True] * (length - 1))
    return dataset


def samples_of(row):
    """Returns the sample numbers of a packed row; an empty row has none."""
    if not row.num_tokens:
        return []
    return [int(tokens[0]) for tokens in row.token_ids.split(row.lengths)]


layouts = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(2, 40), min_size=1, max_size=40),
        "batch_size": st.integers(1, 12),
        "world": st.integers(1, 5),
        "budget": st.one_of(
            st.fixed_dictionaries({"micro_batch_size": st.integers(1, 4)}),
            st.fixed_dictionaries({"max_tokens": st.integers(2, 60)}),
        ),
        "seed": st.integers(0, 3),
    }
)


@settings(deadline=None)
@given(layouts)
def test_every_sample_once_in_an_epoch_and_ranks_in_step(layout):
    dataset = make_dataset(layout["lengths"])
    ranks = [
        MiniBatches(
            dataset,
            PackedRow.of,
            batch_size=layout["batch_size"],
            data_rank=rank,
            data_size=layout["world"],
            seed=layout["seed"],
            **layout["budget"],
        )
        for rank in range(layout["world"])
    ]
    seen = []
    steps = list(zip(*(rank.epoch(1) for rank in ranks), strict=True))
    assert len(steps) == len(ranks[0])
    for step in steps:
        assert len({len(rows) for rows in step}) == 1, "ranks must have the same number of rows"
        batch = [i for rows in step for row in rows for i in samples_of(row)]
        assert len(batch) == min(layout["batch_size"], len(dataset) - len(seen))
        seen += batch
        for row in (row for rows in step for row in rows):
            inside = samples_of(row)
            assert len(inside) <= layout["budget"].get("micro_batch_size", len(inside))
            fits = len(row.token_ids) <= layout["budget"].get("max_tokens", len(row.token_ids))
            assert fits or len(inside) == 1 or not inside
    assert sorted(seen) == list(range(len(dataset)))


@settings(deadline=None)
@given(layouts, st.integers(0, 50))
def test_an_epoch_resumes_at_a_step(layout, start):
    mini_batches = MiniBatches(
        make_dataset(layout["lengths"]),
        PackedRow.of,
        batch_size=layout["batch_size"],
        data_rank=layout["world"] - 1,
        data_size=layout["world"],
        seed=layout["seed"],
        **layout["budget"],
    )
    whole = [[samples_of(row) for row in rows] for rows in mini_batches.epoch(2)]
    resumed = [[samples_of(row) for row in rows] for rows in mini_batches.epoch(2, start_step=start)]
    assert resumed == whole[start:]
    steps = 2 * len(mini_batches) + start
    endless = [
        [samples_of(row) for row in rows] for rows in islice(mini_batches.endless(steps), 2 * len(whole))
    ]
    assert endless == [
        [samples_of(row) for row in rows]
        for step in range(steps, steps + 2 * len(whole))
        for rows in islice(mini_batches.epoch(step // len(mini_batches), step % len(mini_batches)), 1)
    ]


def test_rows_hold_the_samples_token_by_token():
    mini_batches = MiniBatches(
        make_dataset([3, 2]),
        PackedRow.of,
        batch_size=2,
        max_tokens=8,
        data_rank=0,
        data_size=1,
        seed=0,
        shuffle=False,
    )
    ((row,),) = mini_batches.epoch(0)
    assert row.token_ids.tolist() == [0, 0, 0, 1, 1]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert row.action_mask.tolist() == [False, True, True, False, True]
    assert row.lengths == (3, 2)
    assert row.token_ids.dtype == torch.int64


def test_work_is_balanced():
    """One rank takes the sample of length 100; the other ranks share those of length 1."""
    mini_batches = MiniBatches(
        make_dataset([100] + [2] * 50),
        PackedRow.of,
        batch_size=51,
        max_tokens=128,
        data_rank=0,
        data_size=2,
        seed=0,
    )
    tokens = [
        sum(mini_batches.dataset.lengths[i] for row in rows for i in row)
        for rows in mini_batches.shard(range(51))
    ]
    assert sorted(tokens) == [100, 100]


def test_the_order_changes_with_the_epoch():
    mini_batches = MiniBatches(
        make_dataset([2] * 20),
        PackedRow.of,
        batch_size=20,
        micro_batch_size=20,
        data_rank=0,
        data_size=1,
        seed=0,
    )
    orders = [samples_of(next(mini_batches.epoch(epoch))[0]) for epoch in (0, 1, 0)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert orders[0] == orders[2]


def test_exactly_one_size_of_a_row_is_required():
    for sizes in ({}, {"micro_batch_size": 1, "max_tokens": 8}):
        with pytest.raises(ValueError, match=r"micro_batch_size .*max_tokens"):
            MiniBatches(
                make_dataset([2]), PackedRow.of, batch_size=1, data_rank=0, data_size=1, seed=0, **sizes
            )
