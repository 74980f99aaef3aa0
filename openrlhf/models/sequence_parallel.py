"""Implements sequence (context) parallelism: each rank runs the model on a slice of a row's tokens.

A row is padded at its end and split into two equal chunks per rank; the border of a chunk may lie inside a
sequence. The slice of rank r of W is chunk r and chunk 2W - 1 - r (zigzag): the first chunk attends to few
earlier tokens and the second to many, so the ranks' work is about equal. All layers except attention process
each token separately. Attention sees whole sequences (models/attention.py), and the head's outputs for the
actions of each slice are collected (models/backbone.py), so that every rank computes the loss of the whole
row.

Every rank has a copy of the loss, and each collective is differentiated as a function of all ranks' tensors:
the backward pass of a gather sums the gradients of all copies. The mean over ranks that DeepSpeed computes is
then the gradient of the loss.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.config.choices import SequenceParallelMode
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.collectives import differentiable, exchanged, gathered_rows, scattered_sum, summed
from openrlhf.models.packing import Packing
from openrlhf.rows import PackedRow
from openrlhf.types import not_none


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceParallel:
    """A sequence-parallel group, and this process's rank in it."""

    group: dist.ProcessGroup
    mode: SequenceParallelMode = "auto"
    heads_at_a_time: int = 1
    """Key/value heads gathered at a time: `--ds.ring_attn_head_stride`."""

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def padded(self, row: PackedRow) -> PackedRow:
        """Pads the row with one more sequence, without actions, if its tokens do not divide evenly into
        chunks."""
        missing = -len(row.token_ids) % (2 * self.size)
        if not missing:
            return row
        more = torch.arange(missing, device=row.token_ids.device)
        return replace(
            row,
            token_ids=torch.cat([row.token_ids, torch.zeros_like(more)]),
            position_ids=torch.cat([row.position_ids, more]),
            lengths=(*row.lengths, missing),
        )

    def chunks(self, rank: int) -> tuple[int, int]:
        """Returns the indices of the two chunks in the slice of `rank`."""
        return rank, 2 * self.size - 1 - rank

    def own(self, x: Tensor) -> Tensor:
        """Returns this rank's slice (n,) of a padded row's tensor (N,)."""
        chunks = x.chunk(2 * self.size)
        return torch.cat([chunks[i] for i in self.chunks(self.rank)])

    def locate(self, places: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Returns which of `places` (A,), indices of tokens in a row of `num_tokens` tokens, are in this
        rank's slice: their indices in `places`, (a,), and the indices of these tokens in the slice, (a,)."""
        size = -(-num_tokens // (2 * self.size))
        first, second = self.chunks(self.rank)
        chunk = places // size
        (own,) = torch.where((chunk == first) | (chunk == second))
        return own, places[own] % size + size * (chunk[own] == second)

    def gathered(self, x: Tensor) -> Tensor:
        """Gathers each rank's slice (n, ...) into the whole row (N, ...)."""
        whole = differentiable(x, self.group, gathered_rows, scattered_sum)
        return self._as_row(whole.chunk(self.size), dim=0)

    def send_to_next(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts sending `x` to the next rank of the ring. Returns a function that waits for the tensor of
        the previous rank and returns it."""
        x = x.contiguous()
        received = torch.empty_like(x)
        to, of = [0] * self.size, [0] * self.size
        to[(self.rank + 1) % self.size] = of[(self.rank - 1) % self.size] = len(x)
        work = dist.all_to_all_single(received, x, of, to, group=self.group, async_op=True)

        def wait() -> Tensor:
            not_none(work).wait()  # bounded: timeout of the group
            return received

        return wait

    def _as_row(self, slices: Sequence[Tensor], dim: int) -> Tensor:
        """Reorders the slices of all ranks, given in the order of the ranks, into the order of the row's
        tokens."""
        first, second = zip(*(x.chunk(2, dim) for x in slices), strict=True)
        return torch.cat([*first, *reversed(second)], dim)

    def _as_slices(self, x: Tensor) -> Tensor:
        """Reorders (N, ...) from the order of the row's tokens into the concatenated slices of all ranks."""
        chunks = x.chunk(2 * self.size)
        return torch.cat([chunks[i] for rank in range(self.size) for i in self.chunks(rank)])

    def splits_heads(self, num_heads: int, num_kv: int) -> bool:
        """Returns True if each rank computes attention of some heads over whole rows (Ulysses), and False if
        it computes all heads for the queries of its slice. `num_kv`: number of key heads, each of which
        serves equally many query heads. Raises UsageError if mode `ulysses` cannot divide the heads."""
        divides = num_heads % math.lcm(num_kv, self.size) == 0
        if self.mode == "ulysses" and not divides:
            text = (
                f"the model's {num_heads} query heads and {num_kv} key heads cannot be divided evenly among "
                f"{self.size} ranks (--ds.ring_attn_size).\nUse auto."
            )
            raise UsageError(ErrorCode.CONFLICT, text, flag="--ds.sequence_parallel_mode", value="ulysses")
        return divides and self.mode in ("auto", "ulysses")

    def copies(self, num_kv: int) -> int:
        """Returns how often each key head must be repeated so that every rank has the key heads of its query
        heads."""
        return math.lcm(num_kv, self.size) // num_kv

    def own_heads(self, num_heads: int) -> slice:
        """Returns the heads whose attention this rank computes."""
        size = num_heads // self.size
        return slice(self.rank * size, (self.rank + 1) * size)

    def whole_row(self, x: Tensor) -> Tensor:
        """Exchanges each rank's slice (heads, n, d) for the whole row of this rank's heads (heads / ranks, N,
        d)."""
        return self._as_row(self._exchanged(x).chunk(self.size), dim=1)

    def all_heads(self, x: Tensor) -> Tensor:
        """Exchanges each rank's heads (N, heads / ranks, d) for all heads of this rank's slice (n, heads,
        d)."""
        by_heads = self._exchanged(self._as_slices(x)).unflatten(0, (self.size, -1))
        return by_heads.transpose(0, 1).flatten(1, 2)

    def summed(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over the ranks."""
        return differentiable(x, self.group, summed, summed)

    def _exchanged(self, x: Tensor) -> Tensor:
        return differentiable(x, self.group, exchanged, exchanged)


class Cut(NamedTuple):
    """The sequences that have tokens in a slice of a row."""

    inside: tuple[int, ...]
    """Number of tokens of each sequence inside the slice."""
    until: tuple[int, ...]
    """Number of tokens of each sequence up to its last token in the slice: all tokens to which its tokens in
    the slice may attend."""
    seen: slice
    """Range in the row of the tokens that `until` counts."""


def cut(lengths: Sequence[int], start: int, end: int) -> Cut:
    """Returns the sequences in the non-empty slice from `start` to `end` of a row with sequences of these
    lengths."""
    inside, until, first, border = [], [], end, 0
    for length in lengths:
        begin, border = border, border + length
        tokens = min(border, end) - max(begin, start)
        if tokens > 0:
            inside.append(tokens)
            until.append(min(border, end) - begin)
            first = min(first, begin)
    return Cut(tuple(inside), tuple(until), slice(first, end))


class Chunk(NamedTuple):
    """One of the two chunks of this rank's slice, and the part of the row to which its tokens attend."""

    number: int
    queries: Packing
    keys: Packing
    """The same sequences, each up to its last query."""
    seen: slice
    """Range of the keys in the row."""

    @property
    def size(self) -> int:
        return sum(self.queries.lengths)


class Block(NamedTuple):
    """Queries of this rank, and the keys of one rank that they attend to."""

    own: slice
    """Range of the queries in this rank's slice."""
    of: slice
    """Range of the keys in the other rank's slice."""
    queries: Packing
    keys: Packing
    """As many sequences as `queries`. Queries attend to all keys of their sequence, or if `causal` up to
    their own."""
    causal: bool


class RowShard(NamedTuple):
    """The slice of a row on this rank, and the parts of the row to which its tokens attend."""

    sharing: SequenceParallel
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, sharing: SequenceParallel, lengths: Sequence[int], device: torch.device) -> Self:
        """Returns this rank's slice of a padded row with sequences of these lengths."""
        size = sum(lengths) // (2 * sharing.size)
        chunks = []
        for number in sharing.chunks(sharing.rank):
            inside, until, seen = cut(lengths, number * size, (number + 1) * size)
            chunks.append(Chunk(number, Packing.of(inside, device), Packing.of(until, device), seen))
        return cls(sharing, tuple(chunks))

    def blocks(self, rank: int) -> Iterator[Block]:
        """Yields the blocks of keys of `rank` that this rank's queries attend to."""
        for i, chunk in enumerate(self.chunks):
            for j, other in enumerate(self.sharing.chunks(rank)):
                size, queries = chunk.size, chunk.queries
                if other == chunk.number:
                    place = slice(i * size, (i + 1) * size)
                    yield Block(place, place, queries, queries, causal=True)
                    continue
                # An earlier chunk: its last sequence may continue in this chunk.
                start = max(0, chunk.seen.start - other * size)
                if other < chunk.number and start < size:
                    own = slice(i * size, i * size + queries.lengths[0])
                    of = slice(j * size + start, (j + 1) * size)
                    packings = (Packing.of((x.stop - x.start,), queries.cumulative.device) for x in (own, of))
                    yield Block(own, of, *packings, causal=False)
