"""Collectives of tensor and sequence parallelism as differentiable functions.

The gradient is that of the sum of all ranks' losses. The collective for the backward pass therefore depends
on the use of the forward result: `tensor_parallel.py` and `sequence_parallel.py` pass both.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def differentiable(x: Tensor, group: dist.ProcessGroup, forward: Collective, backward: Collective) -> Tensor:
    """Returns `forward(x, group)`. The gradient of `x` is `backward(gradient of the result, group)`."""
    return _Differentiable.apply(x, group, forward, backward)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, group: dist.ProcessGroup, forward: Collective, backward: Collective
    ) -> Tensor:
        ctx.group, ctx.differentiate = group, backward
        return forward(x, group)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  torch does not type this decorator
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.differentiate(grad, ctx.group), None, None, None


def replicated(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns `x`, which is equal on all ranks, for different uses on each rank."""
    return x.view_as(x)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of `x` over the ranks."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges block i of rank j with block j of rank i. `x` consists of one block per rank."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def gathered_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the ranks' tensors (n, ...) in rank order."""
    whole = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_single(whole, x.contiguous(), group=group)
    return whole


def scattered_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums `x` (N, ...) over the ranks, and returns this rank's equal part of the sum."""
    own = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_single(own, x.contiguous(), group=group)
    return own


def joined(x: Tensor, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """Concatenates the ranks' tensors along `dim` in rank order."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group)
    return torch.cat(parts, dim)


def own_part(x: Tensor, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """Returns this rank's equal part of a tensor along `dim`."""
    return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)
