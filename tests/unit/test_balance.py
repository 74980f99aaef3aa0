import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algos.balance import estimated_cost, pack_to_budget, partition

lengths_lists = st.lists(st.integers(1, 30), max_size=30)


def test_pack_by_hand():
    # 7 opens a row, 5 and 5 do not fit beside it but with each other, 3 fits beside 7, 2 opens the last
    assert pack_to_budget([5, 2, 7, 3, 5], budget=10) == [[2, 3], [0, 4], [1]]
    # 12 is more than the budget: alone
    assert pack_to_budget([4, 12, 4], budget=10) == [[1], [0, 2]]
    assert pack_to_budget([], budget=10) == []


@settings(deadline=None, max_examples=100)
@given(lengths=lengths_lists, budget=st.integers(1, 40))
def test_pack_keeps_the_budget_and_every_sample(lengths, budget):
    rows = pack_to_budget(lengths, budget)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == 1 or sum(lengths[i] for i in row) <= budget
    # two rows at most half full would have been one
    assert sum(2 * sum(lengths[i] for i in row) <= budget for row in rows) <= 1
    assert rows == pack_to_budget(lengths, budget)


def test_pack_respects_the_budget_where_rounding_down_would_not():
    """15 sequences that fill a row each, on 8 ranks: 15 rows, not 8 of double size."""
    assert len(pack_to_budget([10] * 15, budget=10)) == 15


def test_partition_by_hand():
    # 8 against 7, 7 against 6 ... the textbook example: differences 1, 1, 4 -> 4, 0 -> 16 and 14
    assert partition([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]
    assert partition([3.0, 1.0], 3) == [[0], [1], []]
    assert partition([], 2) == [[], []]


@settings(deadline=None, max_examples=100)
@given(costs=lengths_lists, k=st.integers(1, 6), equal_size=st.booleans())
def test_partition_keeps_every_sample(costs, k, equal_size):
    parts = partition(costs, k, equal_size=equal_size)
    assert len(parts) == k
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    assert parts == partition(costs, k, equal_size=equal_size)
    if equal_size:
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    elif costs:
        # no part exceeds another by more than the largest cost
        sums = [sum(costs[i] for i in part) for part in parts]
        assert max(sums) - min(sums) <= max(costs)


def test_partition_is_better_than_dealing_in_order():
    costs = [100, 1, 1, 1, 90, 1, 1, 1, 80, 1, 1, 1, 70, 1, 1, 1]
    for equal_size in (False, True):
        sums = [sum(costs[i] for i in part) for part in partition(costs, 4, equal_size=equal_size)]
        assert max(sums) <= 103
    assert sum(costs[0::4]) == 340


def test_estimated_cost():
    # as much attention as matrix products at the crossover
    assert estimated_cost(1000, crossover=1000) == pytest.approx(2000)
    assert estimated_cost(500, crossover=1000) == pytest.approx(750)
