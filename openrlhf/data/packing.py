"""Packs sequences into rows under a token budget and balances work over ranks. Deterministic."""

import bisect
import heapq
from collections.abc import Sequence

import numpy as np


def pack_to_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Returns rows of indices into `lengths`; no row sums to more than `budget`, except a longer sequence
    alone in its row.

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
    """Returns `k` parts of indices into `costs` with nearly equal sums, costliest part first. With fewer
    costs than parts some parts are empty. With `equal_size`, part sizes differ by at most one.

    Greedy longest processing time first (LPT, Graham 1969): the costliest index goes to the part with the
    smallest sum; with `equal_size` k at a time, one to each part. Then the costliest part exchanges indices
    with others until no exchange makes it cheaper or it is within `UNEVEN` of the mean.
    """
    order = _decreasing(costs)
    totals = [(0.0, part) for part in range(k)]
    parts: list[list[int]] = [[] for _ in range(k)]
    for start in range(0, len(order), k) if equal_size else ():
        dealt = order[start : start + k]
        for i, (total, part) in zip(dealt, [heapq.heappop(totals) for _ in dealt], strict=True):
            parts[part].append(i)
            heapq.heappush(totals, (total + costs[i], part))
    for i in () if equal_size else order:
        total, part = totals[0]
        parts[part].append(i)
        heapq.heapreplace(totals, (total + costs[i], part))
    _even_out(costs, parts, may_move=not equal_size)
    parts.sort(key=lambda part: -sum(costs[i] for i in part))
    return [sorted(part) for part in parts]


UNEVEN = 0.001
"""Fraction of the mean: the tolerated excess of the costliest part, and the least gain of an exchange."""


def _even_out(costs: Sequence[float], parts: list[list[int]], *, may_move: bool) -> None:
    """Exchanges indices between the costliest part and the cheapest part with a useful exchange; with
    `may_move` an index may also move without one in return."""
    totals = [sum(costs[i] for i in part) for part in parts]
    mean = sum(totals) / len(parts)
    for _ in costs:
        *others, top = sorted(range(len(parts)), key=totals.__getitem__)
        if totals[top] <= (1 + UNEVEN) * mean:
            return
        for other in others:
            gap = totals[top] - totals[other]
            exchange = _exchange(costs, parts[top], parts[other], gap, UNEVEN * mean, may_move)
            if exchange is not None:
                break
        else:
            return
        given, taken = exchange
        for source, target, moved in ((top, other, given), (other, top, taken)):
            for i in moved:
                parts[source].remove(i)
                parts[target].append(i)
                totals[source] -= costs[i]
                totals[target] += costs[i]


def _exchange(
    costs: Sequence[float], rich: Sequence[int], poor: Sequence[int], gap: float, least: float, may_move: bool
) -> tuple[list[int], list[int]] | None:
    """Returns (indices that `rich` gives, indices that it takes) that bring the two sums, now `gap` apart,
    closest together. None where the larger sum would lose less than `least`."""
    on_offer = sorted((costs[i], [i]) for i in poor)
    if may_move:
        on_offer.insert(0, (0, []))
    best, chosen = gap / 2 - least, None
    for i in rich:
        near = bisect.bisect(on_offer, costs[i] - gap / 2, key=lambda offer: offer[0])
        for cost, taken in on_offer[max(0, near - 1) : near + 1]:
            if (off := abs(costs[i] - cost - gap / 2)) < best:
                best, chosen = off, ([i], taken)
    return chosen


def estimated_cost(length: int, *, crossover: int = 24576) -> float:
    """Returns the work of one sequence in units of a token's matrix products: those grow linearly with the
    length, attention with its square. `crossover` is the length at which both are equal, in a dense
    transformer about 12 times its width."""
    return length + length**2 / crossover


def _decreasing(sizes: Sequence[float]) -> list[int]:
    return np.negative(sizes).argsort(kind="stable").tolist()
