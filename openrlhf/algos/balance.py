"""Which sequences go together: rows under a token budget, and equal work for every rank. Same input, same
answer."""

import heapq
from collections.abc import Sequence


def pack_to_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of indices into `lengths`; no row sums to more than `budget`, except a longer sequence alone in
    its row.

    First-fit decreasing: at most 11/9 of the fewest possible rows, and 6/9 of a row more.
    """
    rows: list[list[int]] = []
    space: list[int] = []
    for index in _decreasing(lengths):
        length = lengths[index]
        row = next((r for r, free in enumerate(space) if length <= free), len(rows))
        if row == len(rows):
            rows.append([])
            space.append(budget)
        rows[row].append(index)
        space[row] -= length
    return rows


def partition(costs: Sequence[float], k: int, *, equal_size: bool = False) -> list[list[int]]:
    """`k` parts of indices into `costs` with nearly equal sums, costliest first. With fewer costs than parts
    some parts are empty. With `equal_size`, no part has two more indices than another.

    With many costs for each part: the costliest first, each to the part that has least, which leaves less
    than the cheapest to even out. With few: largest differencing (Karmarkar and Karp 1982): start from
    partitions of a few indices each; again and again take the two with the largest spread and put the costly
    parts of one together with the cheap parts of the other.
    """
    order = _decreasing(costs)
    if len(costs) > MANY * k and not equal_size:
        return _greedy(costs, order, k)
    step = k if equal_size else 1
    heap = []
    for start in range(0, len(order), step):
        parts = [(costs[i], [i]) for i in order[start : start + step]]
        parts += [(0, [])] * (k - len(parts))
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], start, parts))
    while len(heap) > 1:
        _, start, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        parts = sorted(((a + b, i + j) for (a, i), (b, j) in pairs), key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], start, parts))
    return [sorted(indices) for _, indices in heap[0][2]] if heap else [[] for _ in range(k)]


MANY = 64
"""Costs for each part from which on there is nothing to gain from looking at them together."""


def _greedy(costs: Sequence[float], order: Sequence[int], k: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(k)]
    totals = [(0.0, part) for part in range(k)]
    for i in order:
        total, part = totals[0]
        parts[part].append(i)
        heapq.heapreplace(totals, (total + costs[i], part))
    return [sorted(indices) for indices in parts]


def estimated_cost(length: int, *, crossover: int = 24576) -> float:
    """The work of one sequence, in units of a token's matrix products: those grow with the length, attention
    with its square. `crossover` is the length at which they are equal, in a dense transformer about 12 times
    its width."""
    return length + length**2 / crossover


def _decreasing(sizes: Sequence[float]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])
