"""Ranks that share a row (sequence parallelism): each runs the model on a slice of its tokens.

Slices are equal, for which the row is filled up at its end; an edge may cut a sequence. All of a model but
its attention computes every token by itself. Attention sees whole sequences (models/attention.py), and what a
head says of the actions of each slice is put together (models/backbone.py), so that every rank computes the
loss of the whole row.

So the loss is there as often as there are ranks. What differentiates the sum of these copies is to sum
gradients over the ranks where values were gathered from them; the mean over ranks, which is what DeepSpeed
makes of gradients, is then the gradient of the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.types import PackedRow


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSharing:
    """The ranks that share rows, seen from one of them."""

    group: dist.ProcessGroup
    heads_at_a_time: int = 1
    """Of keys and values, that are gathered at a time: `--ds.ring_attn_head_stride`."""

    @property
    def size(self) -> int:
        return self.group.size()

    def filled_up(self, row: PackedRow) -> PackedRow:
        """The row with one more sequence, without actions, where its tokens do not divide among the ranks."""
        missing = -len(row.token_ids) % self.size
        if not missing:
            return row
        more = torch.arange(missing, device=row.token_ids.device)
        return replace(
            row,
            token_ids=torch.cat([row.token_ids, torch.zeros_like(more)]),
            position_ids=torch.cat([row.position_ids, more]),
            lengths=(*row.lengths, missing),
        )

    def bounds(self, num_tokens: int) -> tuple[int, int]:
        """Of this rank's slice, in a row of `num_tokens` that is filled up."""
        size, rank = -(-num_tokens // self.size), self.group.rank()
        return rank * size, (rank + 1) * size

    def own(self, x: Tensor) -> Tensor:
        """(N,) of a row that is filled up -> (n,) of this rank's slice."""
        return x[slice(*self.bounds(len(x)))]

    def gathered(self, x: Tensor) -> Tensor:
        """(n, ...) of each rank's slice -> (N, ...)"""
        return _Gathered.apply(x, self.group)

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


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
