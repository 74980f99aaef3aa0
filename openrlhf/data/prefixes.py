"""Finds common prefixes of sequences, and puts sequences that share one into the same row, where a model
computes the shared tokens once (models/prefixes.py)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from openrlhf.data.packing import pack_to_budget, partition

FEWEST_TOKENS = 4
"""Minimum length of a common prefix for sharing it to pay off, in tokens."""
SMALLEST_FRACTION = 0.05
"""Minimum fraction of all tokens that sharing must save to pay off."""
REPEATED_TOKEN = 1 / 8
"""Memory of a repeated prefix token relative to that of a computed token: a pass stores only its keys and
values."""


def some_begin_alike(cells: np.ndarray, sizes: np.ndarray) -> bool:
    """Returns whether two sequences have a common prefix of at least `FEWEST_TOKENS` tokens. `cells`,
    `sizes`: see `Neighbours.of`."""
    starts = sizes.cumsum() - sizes
    long_enough = starts[sizes >= FEWEST_TOKENS]
    heads = {cells[start : start + FEWEST_TOKENS].tobytes() for start in long_enough}
    return len(heads) < len(long_enough)


class Neighbours(NamedTuple):
    """An order of sequences in which those with a common prefix are neighbours."""

    order: np.ndarray  # (B,) indices of the sequences
    common: np.ndarray  # (B - 1,) length of the common prefix of each sequence and the next

    @classmethod
    def of(cls, cells: np.ndarray, sizes: np.ndarray) -> Self:
        """Sorts sequences. `sizes`: (B,) number of tokens of each. `cells`: (N, c), the tokens of all
        sequences, one sequence behind the other; two tokens are equal if all their c numbers are."""
        starts = sizes.cumsum() - sizes
        order = _sorted(cells, starts, sizes)
        return cls(order, _common(cells, starts, sizes, order))


def rows_of_related(
    token_ids: np.ndarray, lengths: Sequence[int], *, max_tokens: int | None, max_sequences: int
) -> list[list[int]] | None:
    """Groups sequences into rows so that those with a common prefix share a row. Returns the indices of each
    row's sequences; None if sharing does not pay off.

    token_ids: (N,), the tokens of all sequences, one sequence behind the other.
    max_tokens: limit of a row. A common prefix counts once, its repetitions `REPEATED_TOKEN` a token. A
        longer sequence has a row of its own. None: rows have `max_sequences`.
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
    """Divides sequences into `k` parts with nearly equal numbers of tokens to compute. Returns the indices of
    each part's sequences. `token_ids`: see `rows_of_related`.

    Sequences with a common prefix share a part, unless the largest part would then have more tokens to
    compute than in a division by lengths alone."""
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
        """Returns the number of tokens to compute in a part."""
        saved = (min(shared[a + 1 : b + 1]) for a, b in pairwise(sorted(place[i] for i in part)))
        return sum(lengths[i] for i in part) - sum(saved)

    return min(together, divided, key=lambda parts: max(map(cost, parts)))


def _related(token_ids: np.ndarray, lengths: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Returns the order of `Neighbours`, and the number of tokens that each sequence shares with the one
    before it; None if sharing does not pay off."""
    cells, sizes = token_ids[:, None], np.asarray(lengths)
    if len(sizes) < 2 or not some_begin_alike(cells, sizes):
        return None
    order, common = Neighbours.of(cells, sizes)
    shared = np.where(common >= FEWEST_TOKENS, common, 0)
    if shared.sum() < SMALLEST_FRACTION * len(cells):
        return None
    return order.tolist(), [0, *shared.tolist()]


def _sorted(cells: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the indices of the sequences, sorted by their bytes: those with a common prefix become
    neighbours."""
    data, width = cells.tobytes(), cells.shape[1] * cells.itemsize
    parts = [data[width * start : width * (start + size)] for start, size in zip(starts, sizes, strict=True)]
    return np.array(sorted(range(len(parts)), key=parts.__getitem__))


def _common(cells: np.ndarray, starts: np.ndarray, sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns the length of the common prefix of each two neighbours in `order`."""
    shorter = np.minimum(sizes[order[:-1]], sizes[order[1:]])
    border = shorter.cumsum()
    within = np.arange(border[-1]) - np.repeat(border - shorter, shorter)
    one, other = (np.repeat(starts[of], shorter) + within for of in (order[:-1], order[1:]))
    differs = np.where((cells[one] != cells[other]).any(1), within, within.size)
    common, some = np.zeros_like(shorter), shorter > 0
    common[some] = np.minimum.reduceat(differs, (border - shorter)[some])
    return np.minimum(common, shorter)
