"""Finds common prefixes of sequences, and puts sequences that share one into the same row, where a model
computes the shared tokens once (models/prefixes.py)."""

import bisect
from collections.abc import Iterable, Sequence
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

    def select(self, indices: np.ndarray, sizes: np.ndarray) -> "Neighbours":
        """Returns what `of` returns for the sequences at `indices`, without a look at their tokens. `sizes`:
        (B,) number of tokens of each sequence."""
        ordered = sizes[self.order]
        is_equal = (self.common == ordered[:-1]) & (ordered[:-1] == ordered[1:])
        ranks, places = np.empty((2, len(sizes)), int)
        ranks[self.order] = np.concatenate([[0], (~is_equal).cumsum()])  # equal ones in the order of indices
        places[self.order] = np.arange(len(sizes))
        order = ranks[indices].argsort(kind="stable")
        chosen = places[indices][order]
        borders = np.sort(np.stack([chosen[:-1], chosen[1:]], axis=1), axis=1).ravel()
        common = np.concatenate([self.common, [0]])
        return Neighbours(order, np.minimum.reduceat(common, borders)[::2] if len(borders) else common[:0])


class Related:
    """The common prefixes of items, each of which has one or several sequences."""

    def __init__(
        self, order: np.ndarray, common: np.ndarray, lengths: Sequence[int], sequences_per_item: int
    ) -> None:
        """`order`, `common`: see `Neighbours`. `lengths`: number of tokens of each sequence, item after
        item."""
        shared = np.where(common >= FEWEST_TOKENS, common, 0)
        self._shared = np.concatenate([[0], shared, [0]])
        """Length of the common prefix of each sequence in `order` and the one before it; 0 at the end."""
        self._sizes = np.asarray(lengths)[order]
        self._places = order.argsort().reshape(-1, sequences_per_item)
        """(items, sequences of each) indices in `order`."""
        self.order: list[int] = self._places[:, 0].argsort().tolist()
        """The items in an order in which those whose first sequences have a common prefix are neighbours."""

    @classmethod
    def of(cls, token_ids: np.ndarray, lengths: Sequence[int], *, sequences_per_item: int = 1) -> Self | None:
        """Compares sequences; see `rows_of_related`. Returns None if sharing does not pay off."""
        cells, sizes = token_ids[:, None], np.asarray(lengths)
        if len(sizes) < 2 or not some_begin_alike(cells, sizes):
            return None
        return cls.of_neighbours(Neighbours.of(cells, sizes), lengths, sequences_per_item)

    @classmethod
    def of_neighbours(
        cls, neighbours: Neighbours, lengths: Sequence[int], sequences_per_item: int = 1
    ) -> Self | None:
        """Returns None if sharing does not pay off."""
        order, common = neighbours
        if common[common >= FEWEST_TOKENS].sum() < SMALLEST_FRACTION * sum(lengths):
            return None
        return cls(order, common, lengths, sequences_per_item)

    def tokens(self, items: Iterable[int], *, repeated: float = 0.0) -> float:
        """Returns the number of tokens in the prefix tree of these items. A repetition of a token counts
        `repeated`."""
        places = np.sort(self._places[list(items)], axis=None)
        saved = self._in_common(places[:-1], places[1:]).sum()
        return float(self._sizes[places].sum() - (1 - repeated) * saved)

    def _tokens_of_each(self, *, repeated: float = 0.0) -> np.ndarray:
        """Returns `tokens` of each item alone."""
        places = np.sort(self._places, axis=1)
        saved = self._in_common(places[:, :-1].ravel(), places[:, 1:].ravel()).reshape(len(places), -1)
        return self._sizes[places].sum(1) - (1 - repeated) * saved.sum(1)

    def rows(self, items: Iterable[int], *, max_tokens: int | None, max_items: int) -> list[list[int]]:
        """Groups these items into rows; see `rows_of_related`. `max_items`: items of a row if `max_tokens` is
        None."""
        chosen = set(items)
        ordered = [i for i in self.order if i in chosen]
        if max_tokens is None:
            return [ordered[i : i + max_items] for i in range(0, len(ordered), max_items)]
        rows: list[list[int]] = []
        places: list[int] = []
        tokens = 0.0
        for i in ordered:
            wider, more = self._with(places, i)
            if rows and tokens + more <= max_tokens:
                rows[-1].append(i)
                places, tokens = wider, tokens + more
            else:
                rows.append([i])
                places, tokens = self._with([], i)
        in_order = sorted(chosen)
        sizes = np.ceil(self._tokens_of_each(repeated=REPEATED_TOKEN)[in_order]).astype(int).tolist()
        packed = pack_to_budget(sizes, max_tokens)
        return rows if len(rows) <= len(packed) else [[in_order[i] for i in row] for row in packed]

    def parts(self, k: int, *, equal_size: bool = False) -> list[list[int]]:
        """Divides the items into `k` parts; see `parts_of_related`. `equal_size`: numbers of items differ by
        at most one."""
        sizes = self._tokens_of_each()
        divided = partition(sizes.tolist(), k, equal_size=equal_size)
        first = self._places[self.order, 0]
        common = np.concatenate([[0], self._in_common(first[:-1], first[1:])])
        to_read = np.ones(len(first)) if equal_size else sizes[self.order] - common
        order = np.array(self.order)
        middle = to_read.cumsum() - to_read / 2
        part_of = np.minimum((middle * k / to_read.sum()).astype(int), k - 1)
        together = [sorted(order[part_of == part].tolist()) for part in range(k)]
        return min(together, divided, key=lambda parts: max(map(self.tokens, parts)))

    def _with(self, places: Sequence[int], item: int) -> tuple[list[int], float]:
        """Adds an item to a row, given as the sorted indices in `order` of its sequences. Returns the longer
        row, and the number of tokens by which it grows."""
        places, more = [*places], 0.0
        for place in self._places[item].tolist():
            at = bisect.bisect(places, place)
            before = self._shared[places[at - 1] + 1 : place + 1].min() if at else 0
            after = self._shared[place + 1 : places[at] + 1].min() if at < len(places) else 0
            more += self._sizes[place] - (1 - REPEATED_TOKEN) * max(before, after)
            places.insert(at, place)
        return places, more

    def _in_common(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Returns the lengths of the common prefixes of sequences at the indices a < b of `order`, (P,)
        each."""
        borders = np.stack([a, b], axis=1).ravel() + 1
        return np.minimum.reduceat(self._shared, borders)[::2] if len(a) else np.zeros(0, int)


def _sorted(cells: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the indices of the sequences, sorted by their bytes: those with a common prefix become
    neighbours."""
    data, width = cells.tobytes(), cells.shape[1] * cells.itemsize
    parts = [data[width * start : width * (start + size)] for start, size in zip(starts, sizes, strict=True)]
    return np.array(sorted(range(len(parts)), key=parts.__getitem__))


def _common(cells: np.ndarray, starts: np.ndarray, sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns the length of the common prefix of each two neighbours in `order`. It compares a few tokens of
    all neighbours first, then more of those that are still equal."""
    shorter = np.minimum(sizes[order[:-1]], sizes[order[1:]])
    common = np.zeros_like(shorter)
    equal, begin, width = np.flatnonzero(shorter), 0, 16
    while len(equal):
        count = np.minimum(shorter[equal] - begin, width)
        border = count.cumsum()
        within = np.arange(border[-1]) - np.repeat(border - count, count)
        one, other = (np.repeat(starts[of][equal] + begin, count) + within for of in (order[:-1], order[1:]))
        differs = np.where((cells[one] != cells[other]).any(1), within, within.size)
        found = np.minimum(np.minimum.reduceat(differs, border - count), count)
        common[equal] += found
        begin += width
        equal = equal[(found == width) & (shorter[equal] > begin)]
        width *= 2
    return common
