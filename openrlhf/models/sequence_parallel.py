"""Ranks that share a row (sequence parallelism): each runs the model on a slice of its tokens.

Slices are equal, for which the row is filled up at its end; an edge may cut a sequence. All of a model but
its attention computes every token by itself. Attention sees whole sequences (models/attention.py), and what a
head says of the actions of each slice is put together (models/backbone.py), so that every rank computes the
loss of the whole row.

Every rank has a copy of the loss, and each collective is differentiated as what it is, a function of all
ranks' tensors: where values were gathered, the gradients of all copies are summed. DeepSpeed's mean over the
ranks is then the gradient of the loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.config.choices import SequenceParallelMode
from openrlhf.types import PackedRow


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSharing:
    """The ranks that share rows, seen from one of them."""

    group: dist.ProcessGroup
    mode: SequenceParallelMode = "auto"
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

    def splits_heads(self, num_heads: int, num_kv: int) -> bool:
        """Whether each rank attends with a part of the heads over whole rows; else with all from its slice.
        `num_kv`: heads of keys, each for as many of the others."""
        divides = num_heads % math.lcm(num_kv, self.size) == 0
        if self.mode == "ulysses" and not divides:
            raise ValueError(
                f"--ds.sequence_parallel_mode ulysses: the model's {num_heads} heads, {num_kv} of keys, do "
                f"not divide among {self.size} ranks (--ds.ring_attn_size).\nUse auto."
            )
        return divides and self.mode != "allgather"

    def copies(self, num_kv: int) -> int:
        """Of each head of keys, so that every rank has those that its queries look at."""
        return math.lcm(num_kv, self.size) // num_kv

    def own_heads(self, num_heads: int) -> slice:
        """That this rank attends with."""
        size = num_heads // self.size
        return slice(self.group.rank() * size, (self.group.rank() + 1) * size)

    def whole_row(self, x: Tensor) -> Tensor:
        """(heads, n, d) of each rank's slice -> (heads / ranks, N, d) of this rank's heads."""
        by_slice = _Exchanged.apply(x, self.group).unflatten(0, (self.size, -1))
        return by_slice.transpose(0, 1).flatten(1, 2)

    def all_heads(self, x: Tensor) -> Tensor:
        """(N, heads / ranks, d) of each rank's heads -> (n, heads, d) of this rank's slice."""
        by_heads = _Exchanged.apply(x, self.group).unflatten(0, (self.size, -1))
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
