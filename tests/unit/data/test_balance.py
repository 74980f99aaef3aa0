import itertools
import random
import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.data.packing import estimated_cost, pack_to_budget, partition

lengths_lists = st.lists(st.integers(1, 30), max_size=30)


def test_pack_by_hand():
    # 7 opens a row, 5 and 5 do not fit beside it but with each other, 3 fits beside 7, 2 opens the last
    assert pack_to_budget([5, 2, 7, 3, 5], budget=10) == [[2, 3], [0, 4], [1]]
    # 12 is more than the budget and gets a row of its own
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
    """15 sequences that fill a row each, on 8 ranks, make 15 rows, not 8 of double size."""
    assert len(pack_to_budget([10] * 15, budget=10)) == 15


def test_partition_by_hand():
    # dealt: 8, 5, 4 and 7, 6; swapping 8 and 6 halves the gap of 4: 15 and 15
    assert partition([8, 7, 6, 5, 4], 2) == [[2, 3, 4], [0, 1]]
    # 9, 5, 5 and 7, 7, 3: a gap of 2 is evened out only by a pair whose costs differ by 1, and there is none
    assert partition([9, 7, 7, 5, 5, 3], 2) == [[0, 3, 4], [1, 2, 5]]
    # 3 alone is more than half; equal parts put the cheapest one beside it
    assert partition([30, 4, 3, 2], 2) == [[0], [1, 2, 3]]
    assert partition([30, 4, 3, 2], 2, equal_size=True) == [[0, 3], [1, 2]]
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


# ---- lengths like those of reasoning, from the benchmark

BENCHMARK = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "balance.py"))
least_possible, LENGTHS = BENCHMARK["least_possible"], BENCHMARK["LENGTHS"]


def test_the_bound_by_hand():
    assert least_possible([9, 1, 1], 2) == 9  # the longest alone
    assert least_possible([5, 4, 4, 4], 3) == 8  # of four in three parts two are together
    # of five in two parts three are together: 3, 2, 2; the mean is 6.5
    assert least_possible([3, 3, 3, 2, 2], 2) == 7
    assert least_possible([5, 5, 5, 5], 2) == 10  # the mean


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(
    ("n", "k", "off"),
    [
        # 16 or more sequences a rank
        *((128, 8, 0.01), (512, 8, 0.002), (1024, 64, 0.003), (4096, 128, 0.002), (8192, 512, 0.002)),
        # 8 a rank, 2 or 3 of them long
        *((512, 64, 0.03), (4096, 512, 0.03)),
    ],
)
def test_ranks_get_as_much_as_the_longest_sequences_let_them(name: str, n: int, k: int, off: float):
    lengths = LENGTHS[name](n, random.Random(n))
    for equal_size in {False, n >= 16 * k}:
        parts = partition(lengths, k, equal_size=equal_size)
        most = max(sum(lengths[i] for i in part) for part in parts)
        assert most <= (1 + off) * least_possible(lengths, k), equal_size


def test_estimated_cost():
    # at the crossover attention costs as much as matrix products
    assert estimated_cost(1000, crossover=1000) == pytest.approx(2000)
    assert estimated_cost(500, crossover=1000) == pytest.approx(750)
