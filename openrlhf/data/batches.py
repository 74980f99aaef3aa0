"""Deals samples to ranks and packs them into rows, one optimizer step at a time."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from openrlhf.data.order import epoch_order
from openrlhf.data.packing import estimated_cost, pack_to_budget, partition
from openrlhf.data.prefixes import Related


class Row(Protocol):
    def empty(self) -> Self:
        """Returns a row of the same kind in which no token is learned."""
        ...


RowT = TypeVar("RowT", bound=Row)


class Dataset(Protocol):
    """A dataset of supervised training: samples, pairs of samples, or samples with labels."""

    @property
    def lengths(self) -> Sequence[int]:
        """Number of tokens of each item."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...

    def sequences(self, i: int, /) -> tuple[np.ndarray, ...]:
        """Returns the token ids of each sequence of an item."""
        ...


@dataclass(eq=False)
class MiniBatches(Generic[RowT]):
    """The optimizer steps of an epoch, as this rank sees them.

    A step takes the next `batch_size` items in the order of the epoch; the last step takes the rest. The
    items are distributed to `data_size` ranks with about equal work, and `collate` packs them into rows of
    `micro_batch_size` items, or of as many as fit into `max_tokens` (a longer item has its own row). Every
    rank gets the same number of rows, padded with empty ones, because ranks meet in collectives at each row.
    Items with common prefixes are side by side if models read those once; `max_tokens` and the work of a rank
    then count them as in `Related`. The result depends on the arguments alone, so ranks agree without
    communication.
    """

    dataset: Dataset
    collate: Callable[[list], RowT]
    _: KW_ONLY
    batch_size: int
    micro_batch_size: int | None = None
    """Exactly one of `micro_batch_size` and `max_tokens` must be given."""
    max_tokens: int | None = None
    data_rank: int
    """This rank's coordinate along the data dimension of its mesh; ranks with the same coordinate get the
    same rows."""
    data_size: int
    seed: int
    shuffle: bool = True
    shares_prefixes: bool = False
    """Whether models compute common prefixes of a row once."""

    def __post_init__(self) -> None:
        if (self.micro_batch_size is None) == (self.max_tokens is None):
            raise ValueError("MiniBatches: give one of micro_batch_size and max_tokens.")

    def __len__(self) -> int:
        """Returns the number of steps of an epoch."""
        return math.ceil(len(self.dataset) / self.batch_size)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[list[RowT]]:
        """Yields this rank's packed rows of each step of one epoch, from `start_step` on."""
        for rows in self.items(epoch, start_step):
            yield [self.pack(items) for items in rows]

    def endless(self, start_step: int = 0) -> Iterator[list[RowT]]:
        """Yields this rank's packed rows of each step from `start_step` on, epoch after epoch."""
        first, start = divmod(start_step, len(self))
        for epoch in itertools.count(first):
            yield from self.epoch(epoch, start if epoch == first else 0)

    def order(self, epoch: int) -> list[int]:
        """Returns the item indices in the order of an epoch."""
        return epoch_order(len(self.dataset), seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def items(self, epoch: int, start_step: int = 0) -> Iterator[list[list[int]]]:
        """Yields, for each step from `start_step` on, the item indices of each of this rank's rows."""
        order = self.order(epoch)
        for step in range(start_step, len(self)):
            yield self.shard(order[step * self.batch_size : (step + 1) * self.batch_size])[self.data_rank]

    def shard(self, batch: Sequence[int]) -> list[list[list[int]]]:
        """Returns the item indices of each row of each rank; a row without items is padding."""
        related = self._related(batch)
        has_equal_ranks = self.micro_batch_size is not None
        lengths = [self.dataset.lengths[i] for i in batch]
        if related is None:
            costs = [estimated_cost(length) for length in lengths]
            of_rank = partition(costs, self.data_size, equal_size=has_equal_ranks)
            laid = [self._rows(mine, lengths) for mine in of_rank]
        else:
            laid = [
                related.rows(mine, max_tokens=self.max_tokens, max_items=self.micro_batch_size or 1)
                for mine in related.parts(self.data_size, equal_size=has_equal_ranks)
            ]
        rows = [[[batch[i] for i in row] for row in mine] for mine in laid]
        num_rows = max(len(mine) for mine in rows)
        return [mine + [[]] * (num_rows - len(mine)) for mine in rows]

    def _related(self, batch: Sequence[int]) -> Related | None:
        """Returns the common prefixes of these items; None if models do not share them."""
        if not self.shares_prefixes:
            return None
        sequences = [self.dataset.sequences(i) for i in batch]
        token_ids = [x for of_item in sequences for x in of_item]
        return Related.of(
            np.concatenate(token_ids),
            [len(x) for x in token_ids],
            sequences_per_item=len(sequences[0]),
        )

    def _rows(self, mine: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        if (size := self.micro_batch_size) is not None:
            return [list(mine[i : i + size]) for i in range(0, len(mine), size)]
        assert self.max_tokens is not None
        packed = pack_to_budget([lengths[i] for i in mine], self.max_tokens)
        return [[mine[i] for i in row] for row in packed]

    def pack(self, items: Sequence[int]) -> RowT:
        """Collates a row of these items; without items an empty row."""
        row = self.collate([self.dataset[i] for i in items or [0]])
        return row if items else row.empty()
