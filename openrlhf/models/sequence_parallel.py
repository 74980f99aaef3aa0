"""Ranks that share a row (sequence parallelism): each runs the model on a slice of its tokens.

A row is filled up at its end and cut into two equal chunks for each rank; an edge may cut a sequence. The
slice of rank r of W is chunk r and chunk 2W - 1 - r (zigzag): its first half looks at few earlier tokens, its
second at many, and all ranks together at about as many. All of a model but its attention computes every token
by itself. Attention sees whole sequences (models/attention.py), and what a head says of the actions of each
slice is put together (models/backbone.py), so that every rank computes the loss of the whole row.

Every rank has a copy of the loss, and each collective is differentiated as what it is, a function of all
ranks' tensors: where values were gathered, the gradients of all copies are summed. DeepSpeed's mean over the
ranks is then the gradient of the loss.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.config.choices import SequenceParallelMode
from openrlhf.types import PackedRow, present


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceParallel:
    """The ranks that share rows, seen from one of them."""

    group: dist.ProcessGroup
    mode: SequenceParallelMode = "auto"
    heads_at_a_time: int = 1
    """Of keys and values, that are gathered at a time: `--ds.ring_attn_head_stride`."""

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def filled_up(self, row: PackedRow) -> PackedRow:
        """The row with one more sequence, without actions, where its tokens do not divide among the
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
        """Which two of a row's chunks are the slice of `rank`."""
        return rank, 2 * self.size - 1 - rank

    def own(self, x: Tensor) -> Tensor:
        """(N,) of a row that is filled up -> (n,) of this rank's slice."""
        chunks = x.chunk(2 * self.size)
        return torch.cat([chunks[i] for i in self.chunks(self.rank)])

    def located(self, places: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """places (A,) in a row of `num_tokens` -> (a,) which of them are in this rank's slice, (a,) where in
        the slice those are."""
        size = -(-num_tokens // (2 * self.size))
        first, second = self.chunks(self.rank)
        chunk = places // size
        (own,) = torch.where((chunk == first) | (chunk == second))
        return own, places[own] % size + size * (chunk[own] == second)

    def gathered(self, x: Tensor) -> Tensor:
        """(n, ...) of each rank's slice -> (N, ...)"""
        return self._as_row(_Gathered.apply(x, self.group).chunk(self.size), dim=0)

    def passed_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to send `x` to the next rank of the ring. Returns what waits for the tensor of the one
        before."""
        x = x.contiguous()
        received = torch.empty_like(x)
        to, of = [0] * self.size, [0] * self.size
        to[(self.rank + 1) % self.size] = of[(self.rank - 1) % self.size] = len(x)
        work = dist.all_to_all_single(received, x, of, to, group=self.group, async_op=True)

        def wait() -> Tensor:
            present(work).wait()
            return received

        return wait

    def _as_row(self, slices: Sequence[Tensor], dim: int) -> Tensor:
        """The slices of all ranks, in the order of the ranks -> in the order of the row's tokens."""
        first, second = zip(*(x.chunk(2, dim) for x in slices), strict=True)
        return torch.cat([*first, *reversed(second)], dim)

    def _as_slices(self, x: Tensor) -> Tensor:
        """(N, ...) in the order of the row's tokens -> (N, ...) the slices of all ranks."""
        chunks = x.chunk(2 * self.size)
        return torch.cat([chunks[i] for rank in range(self.size) for i in self.chunks(rank)])

    def splits_heads(self, num_heads: int, num_kv: int) -> bool:
        """Whether each rank attends with a part of the heads over whole rows; else with all from its slice.
        `num_kv`: heads of keys, each for as many of the others."""
        divides = num_heads % math.lcm(num_kv, self.size) == 0
        if self.mode == "ulysses" and not divides:
            raise ValueError(
                f"--ds.sequence_parallel_mode ulysses: the model's {num_heads} heads, {num_kv} of keys, do "
                f"not divide among {self.size} ranks (--ds.ring_attn_size).\nUse auto."
            )
        return divides and self.mode in ("auto", "ulysses")

    def copies(self, num_kv: int) -> int:
        """Of each head of keys, so that every rank has those that its queries look at."""
        return math.lcm(num_kv, self.size) // num_kv

    def own_heads(self, num_heads: int) -> slice:
        """That this rank attends with."""
        size = num_heads // self.size
        return slice(self.rank * size, (self.rank + 1) * size)

    def whole_row(self, x: Tensor) -> Tensor:
        """(heads, n, d) of each rank's slice -> (heads / ranks, N, d) of this rank's heads."""
        return self._as_row(_Exchanged.apply(x, self.group).chunk(self.size), dim=1)

    def all_heads(self, x: Tensor) -> Tensor:
        """(N, heads / ranks, d) of each rank's heads -> (n, heads, d) of this rank's slice."""
        by_heads = _Exchanged.apply(self._as_slices(x), self.group).unflatten(0, (self.size, -1))
        return by_heads.transpose(0, 1).flatten(1, 2)

    def summed(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`."""
        return _Summed.apply(x, self.group)


class Cut(NamedTuple):
    """The sequences that have tokens in a slice of a row."""

    inside: tuple[int, ...]
    """Their tokens in the slice."""
    until: tuple[int, ...]
    """Their tokens up to the last of those: what these tokens may look at."""
    seen: slice
    """Where the latter are in the row."""


def cut(lengths: Sequence[int], start: int, end: int) -> Cut:
    """Of a row with sequences of these lengths, the slice from `start` to `end`, which has a token."""
    inside, until, first, border = [], [], end, 0
    for length in lengths:
        begin, border = border, border + length
        tokens = min(border, end) - max(begin, start)
        if tokens > 0:
            inside.append(tokens)
            until.append(min(border, end) - begin)
            first = min(first, begin)
    return Cut(tuple(inside), tuple(until), slice(first, end))


class Packing(NamedTuple):
    """Where the sequences of a row lie. Travels through the model to the attention as `packing`."""

    lengths: tuple[int, ...]
    cumulative: Tensor  # (B + 1,) int32, on the row's device
    shard: "RowShard | None" = None
    """None: this rank has the whole row."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        # Summed up here: copying a list to a GPU would wait for it.
        cumulative = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32)
        return cls(tuple(lengths), cumulative.to(device, non_blocking=True))


class Chunk(NamedTuple):
    """One of the two in this rank's slice, and what it sees of the row."""

    number: int
    queries: Packing
    keys: Packing
    """Of the same sequences, each up to its last query."""
    seen: slice
    """Where those are in the row."""

    @property
    def size(self) -> int:
        return sum(self.queries.lengths)


class Block(NamedTuple):
    """Queries of this rank, and keys of one rank that they look at."""

    own: slice
    """Of this rank's slice."""
    of: slice
    """Of the other's."""
    queries: Packing
    keys: Packing
    """As many sequences. Their queries look at all of them, or if `causal` at those up to their own."""
    causal: bool


class RowShard(NamedTuple):
    """This rank's slice of a row, and what it sees of the others'."""

    sharing: SequenceParallel
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, sharing: SequenceParallel, lengths: Sequence[int], device: torch.device) -> Self:
        """`lengths`: of the sequences of a row that is filled up."""
        size = sum(lengths) // (2 * sharing.size)
        chunks = []
        for number in sharing.chunks(sharing.rank):
            inside, until, seen = cut(lengths, number * size, (number + 1) * size)
            chunks.append(Chunk(number, Packing.of(inside, device), Packing.of(until, device), seen))
        return cls(sharing, tuple(chunks))

    def blocks(self, rank: int) -> Iterator[Block]:
        """All that this rank's queries see of the keys of `rank`."""
        for i, chunk in enumerate(self.chunks):
            for j, other in enumerate(self.sharing.chunks(rank)):
                size, queries = chunk.size, chunk.queries
                if other == chunk.number:
                    place = slice(i * size, (i + 1) * size)
                    yield Block(place, place, queries, queries, causal=True)
                    continue
                # Of an earlier chunk, the end of the one sequence that may go on in this one.
                start = max(0, chunk.seen.start - other * size)
                if other < chunk.number and start < size:
                    own = slice(i * size, i * size + queries.lengths[0])
                    of = slice(j * size + start, (j + 1) * size)
                    packings = (Packing.of((x.stop - x.start,), queries.cumulative.device) for x in (own, of))
                    yield Block(own, of, *packings, causal=False)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_single(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  torch does not type this decorator
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_single(own, grad.contiguous(), group=ctx.group)
        return own, None


class _Exchanged(torch.autograd.Function):
    """x has a block for each rank; block i of rank j becomes block j of rank i, and so do their gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  torch does not type this decorator
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  torch does not type this decorator
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, x, group=group)
    return exchanged


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
