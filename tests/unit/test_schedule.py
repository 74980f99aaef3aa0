from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.trainer.schedule import mean_metrics, num_batches, training_schedule

LENGTHS = st.lists(st.integers(2, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 10), st.integers(1, 3), st.integers(1, 4))
def test_each_epoch_visits_each_sample_once(lengths, num_batches, epochs, num_ranks):
    steps = training_schedule(lengths, num_batches=num_batches, epochs=epochs, num_ranks=num_ranks, seed=(1,))
    assert all(len(ranks) == num_ranks for ranks in steps)
    num_batches = min(num_batches, len(lengths))
    assert num_batches * epochs == len(steps)
    for epoch in range(epochs):
        batches = [
            [i for rank in ranks for i in rank]
            for ranks in steps[epoch * num_batches : (epoch + 1) * num_batches]
        ]
        assert Counter(i for batch in batches for i in batch) == Counter(range(len(lengths)))
        sizes = [len(batch) for batch in batches]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("num_sampled", "batch_size", "expected"), [(32, 16, 2), (8, 16, 1), (1, 16, 1), (33, 16, 2)]
)
def test_number_of_steps(num_sampled, batch_size, expected):
    assert num_batches(num_sampled, batch_size) == expected


def test_failed_samples_make_batches_smaller_not_fewer():
    steps = training_schedule([5] * 3, num_batches=2, epochs=1, num_ranks=2, seed=(0,))
    assert sorted(sum(map(len, ranks)) for ranks in steps) == [1, 2]


def test_the_order_is_that_of_the_seed():
    def order(seed):
        return training_schedule([3] * 20, num_batches=4, epochs=2, num_ranks=1, seed=seed)

    assert order((42, 0)) == order((42, 0))
    assert order((42, 0)) != order((42, 1)) != order((43, 1))
    assert order((42, 0))[:4] != order((42, 0))[4:]  # epochs differ


def test_batches_do_not_depend_on_the_number_of_ranks():
    """So that a run on more ranks takes the same optimizer steps."""
    lengths = [(7 * i) % 23 + 2 for i in range(24)]

    def batches(num_ranks):
        steps = training_schedule(lengths, num_batches=3, epochs=2, num_ranks=num_ranks, seed=(1, 2))
        return [sorted(i for rank in ranks for i in rank) for ranks in steps]

    assert batches(1) == batches(2) == batches(5)


def test_ranks_get_about_the_same_number_of_tokens():
    (ranks,) = training_schedule([100, 1, 1, 98, 50, 50], num_batches=1, epochs=1, num_ranks=2, seed=(0,))
    tokens = [sum([100, 1, 1, 98, 50, 50][i] for i in rank) for rank in ranks]
    assert sorted(tokens) == [150, 150]


def test_mean_metrics():
    assert mean_metrics([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}
