"""Finds the common prefixes of sequences, and lays sequences with common prefixes side by side: a model reads
what the sequences of a row have in common once (models/prefixes.py)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from openrlhf.data.packing import pack_to_budget, partition

FEWEST_TOKENS = 4
"""Fewest tokens that a sequence must have in common with another for sharing them to pay."""
SMALLEST_FRACTION = 0.05
"""Smallest fraction of all tokens that must be saved for sharing to pay."""
REPEATED_TOKEN = 1 / 8
"""Memory of a repeated token, of which a pass keeps keys and values alone, in tokens that are read."""


def some_begin_alike(cells: np.ndarray, sizes: np.ndarray) -> bool:
    """Returns whether two sequences have at least `FEWEST_TOKENS` tokens in common."""
    starts = sizes.cumsum() - sizes
    long_enough = starts[sizes >= FEWEST_TOKENS]
    heads = {cells[start : start + FEWEST_TOKENS].tobytes() for start in long_enough}
    return len(heads) < len(long_enough)


class Neighbours(NamedTuple):
    """Sequences in an order in which those with a common prefix are neighbours."""

    order: np.ndarray  # (B,) indices of the sequences
    common: np.ndarray  # (B - 1,) tokens that each has in common with the next, from their beginning

    @classmethod
    def of(cls, cells: np.ndarray, sizes: np.ndarray) -> Self:
        """Sorts sequences of these sizes. cells: (N, c), the tokens of all sequences end to end; two tokens
        are the same where all their numbers are."""
        starts = sizes.cumsum() - sizes
        order = _sorted(cells, starts, sizes)
        return cls(order, _common(cells, starts, sizes, order))


def rows_of_related(
    token_ids: np.ndarray, lengths: Sequence[int], *, max_tokens: int | None, max_sequences: int
) -> list[list[int]] | None:
    """Groups sequences, given end to end, into rows of neighbours. None where sharing does not pay.

    max_tokens: limit of a row, where a common prefix counts once, and its repetitions as `REPEATED_TOKEN`; a
        longer sequence is alone in its row. None: rows have `max_sequences`.
    """
    related = _related(token_ids, lengths) if max_tokens is not None or max_sequences > 1 else None
    if related is None:
        return None
    rows: list[list[int]] = []
    tokens = 0.0
    for i, shared in zip(*related, strict=True):
        more = lengths[i] - shared * (1 - REPEATED_TOKEN)
        if max_tokens is None:
            fits = len(rows[-1]) < max_sequences if rows else False
        else:
            fits = bool(rows) and tokens + more <= max_tokens
        if fits:
            rows[-1].append(i)
            tokens += more
        else:
            rows.append([i])
            tokens = float(lengths[i])
    if max_tokens is not None and len(rows) > len(pack_to_budget(lengths, max_tokens)):
        return None
    return rows


def parts_of_related(token_ids: np.ndarray, lengths: Sequence[int], k: int) -> list[list[int]]:
    """Returns `k` parts of the sequences, given end to end, with nearly equal numbers of tokens to read.
    Sequences with common prefixes are in one part where the costliest part then has no more to read than if
    they were divided by their lengths."""
    divided = partition(lengths, k)
    related = _related(token_ids, lengths) if k > 1 else None
    if related is None:
        return divided
    order, shared = related
    place = {i: rank for rank, i in enumerate(order)}
    to_read = np.array(lengths)[order] - shared
    middle = to_read.cumsum() - to_read / 2
    part_of = np.minimum((middle * k / to_read.sum()).astype(int), k - 1)
    together = [sorted(np.array(order)[part_of == part].tolist()) for part in range(k)]

    def cost(part: Sequence[int]) -> int:
        """Returns the number of tokens to read of a part."""
        saved = (min(shared[a + 1 : b + 1]) for a, b in pairwise(sorted(place[i] for i in part)))
        return sum(lengths[i] for i in part) - sum(saved)

    return min(together, divided, key=lambda parts: max(map(cost, parts)))


def _related(token_ids: np.ndarray, lengths: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Returns the order of neighbours and how many tokens each shares with the one before it, None where
    sharing does not pay."""
    cells, sizes = token_ids[:, None], np.asarray(lengths)
    if len(sizes) < 2 or not some_begin_alike(cells, sizes):
        return None
    order, common = Neighbours.of(cells, sizes)
    shared = np.where(common >= FEWEST_TOKENS, common, 0)
    if shared.sum() < SMALLEST_FRACTION * len(cells):
        return None
    return order.tolist(), [0, *shared.tolist()]


def _sorted(cells: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the indices of the sequences in an order in which those with a common prefix are neighbours:
    that of their bytes."""
    data, width = cells.tobytes(), cells.shape[1] * cells.itemsize
    parts = [data[width * start : width * (start + size)] for start, size in zip(starts, sizes, strict=True)]
    return np.array(sorted(range(len(parts)), key=parts.__getitem__))


def _common(cells: np.ndarray, starts: np.ndarray, sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns the number of tokens that neighbours in `order` have in common from their beginning."""
    shorter = np.minimum(sizes[order[:-1]], sizes[order[1:]])
    border = shorter.cumsum()
    within = np.arange(border[-1]) - np.repeat(border - shorter, shorter)
    one, other = (np.repeat(starts[of], shorter) + within for of in (order[:-1], order[1:]))
    differs = np.where((cells[one] != cells[other]).any(1), within, within.size)
    common, some = np.zeros_like(shorter), shorter > 0
    common[some] = np.minimum.reduceat(differs, (border - shorter)[some])
    return np.minimum(common, shorter)
