"""Ring attention: keys and values are passed from rank to rank, so that no rank ever has those of a whole
row.

Let a query with scores s have the output o_1 and l_1 = log sum e^s over the keys of one rank, and o_2 and l_2
over the keys of others. Over all keys, l = log(e^l_1 + e^l_2) and o = e^(l_1 - l) o_1 + e^(l_2 - l) o_2. The
backward pass over a part of the keys needs l and o over all keys: with p = e^(s - l)

    dv = p^T do    ds = p (do v^T - rowsum(do o))    dq = ds k    dk = ds^T q

These are the formulas of FlashAttention's backward pass, which therefore computes the gradients from l and o.
The gradients of keys and values are passed around the ring behind them, and return to their own rank with the
contributions of all ranks.

Ring attention: https://arxiv.org/abs/2310.01889; the formulas: https://arxiv.org/abs/2307.08691, section 3.1.

q, o and their gradients are (1, heads, n, d), keys and values (1, kv heads, n, d), l is (1, heads, n).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.models.sequence_parallel import Block, RowShard, SequenceParallel
from openrlhf.models.varlen import torch_varlen, varlen_attention
from openrlhf.types import not_none


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, shard: RowShard, scale: float, *, flash: bool
) -> Tensor:
    """Computes causal attention within sequences for the queries of this rank's slice. Collective. Queries,
    keys and values have the same head size. `flash`: use FlashAttention on CUDA, else torch's kernel on the
    CPU."""
    return _Ring.apply(query, key, value, shard, scale, FLASH if flash else ON_CPU)


class Kernel(NamedTuple):
    """An implementation of attention from the queries of a block to its keys."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """Function (q, k, v, block, scale) -> (o, l) over these keys."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Function (do, q, o, l, k, v, block, scale) -> (dq, dk, dv) for these keys. o and l are those over all
    keys."""


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, shard: RowShard, scale: float, kernel: Kernel) -> Tensor:
        total = torch.zeros_like(query, dtype=_wide(query))
        lse = torch.full(query.shape[:3], float("-inf"), dtype=total.dtype, device=query.device)
        for rank, (k, v) in _around_ring(torch.stack([key, value]), shard.sharing):
            for block in shard.blocks(rank):
                own, of = block.own, block.of
                part = kernel.forward(query[:, :, own], k[:, :, of], v[:, :, of], block, scale)
                _add(total[:, :, own], lse[:, :, own], *part)
        output = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.shard, ctx.scale, ctx.kernel = shard, scale, kernel
        return output

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  torch does not type this decorator
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        shard, sharing = ctx.shard, ctx.shard.sharing
        of_queries = grad.contiguous(), query, output, lse
        dq = torch.zeros_like(query, dtype=_wide(query))

        def differentiated(rank: int, kv: Tensor) -> Tensor:
            """Returns the gradient of these keys and values from this rank's queries. Adds the gradient of
            the queries to `dq`."""
            dkv = torch.zeros_like(kv, dtype=dq.dtype)
            for block in shard.blocks(rank):
                own = (x[:, :, block.own] for x in of_queries)
                found = ctx.kernel.backward(*own, *kv[:, :, :, block.of], block, ctx.scale)
                dq[:, :, block.own] += found[0]
                dkv[0, :, :, block.of] += found[1]
                dkv[1, :, :, block.of] += found[2]
            return dkv

        visits, arriving = _around_ring(torch.stack([key, value]), sharing), None
        home = differentiated(*next(visits))
        for rank, kv in visits:
            dkv = differentiated(rank, kv)
            arriving = sharing.send_to_next(dkv if arriving is None else dkv + arriving())
        dk, dv = home + not_none(arriving)()
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None, None


def _around_ring(kv: Tensor, sharing: SequenceParallel) -> Iterator[tuple[int, Tensor]]:
    """Yields every rank, this one first, and the `kv` that it started with. The next `kv` is in transit while
    the caller computes."""
    for step in range(sharing.size):
        arriving = sharing.send_to_next(kv) if step + 1 < sharing.size else None
        yield (sharing.rank - step) % sharing.size, kv
        if arriving is not None:
            kv = arriving()


def _add(total: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges the attention to further keys (`part`, `part_lse`) into `total` and `lse`, in place."""
    both = torch.logaddexp(lse, part_lse)
    total *= (lse - both).exp()[..., None]
    total += part * (part_lse - both).exp()[..., None]
    lse.copy_(both)


def _wide(x: Tensor) -> torch.dtype:
    """Returns the dtype for sums over ranks: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


# ---- kernels


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found = [attend(*x, 0.0, block.causal, scale=scale) for x in _sequences(block, (q,), (k, v))]
    out, lse = (torch.cat(x, 2) for x in zip(*found, strict=True))
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, o: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = [
        differentiate(do, q, k, v, o, log_sum, 0.0, block.causal, scale=scale)
        for do, q, o, log_sum, k, v in _sequences(block, (grad, q, o, lse), (k, v))
    ]
    dq, dk, dv = (torch.cat(x, 2) for x in zip(*found, strict=True))
    return dq, dk, dv


def _sequences(block: Block, of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]) -> Iterator[tuple]:
    """Yields the parts of these tensors that belong to each sequence of the block."""
    queries = (x.split(block.queries.lengths, 2) for x in of_queries)
    return zip(*queries, *(x.split(block.keys.lengths, 2) for x in of_keys), strict=True)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = map(_flat, (q, k, v))
    window = _flash_window(block)
    out, lse = varlen_attention(q, k, v, block.queries, block.keys, scale=scale, window_size=window)
    return out.transpose(0, 1)[None], lse[None]


def _flash_backward(
    grad: Tensor, q: Tensor, o: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    torch_varlen()  # registers the operator
    dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
        *map(_flat, (grad, q, k, v, o)),
        lse[0].contiguous(),
        block.queries.cumulative,
        block.keys.cumulative,
        max(block.queries.lengths),
        max(block.keys.lengths),
        block.causal,
        torch.zeros(2, dtype=torch.uint64, device=q.device),  # dropout's RNG state, unused
        scale,
        list(_flash_window(block)),
    )
    dq, dk, dv = (x.transpose(0, 1)[None] for x in (dq, dk, dv))
    return dq, dk, dv


def _flat(x: Tensor) -> Tensor:
    """Reshapes (1, heads, n, d) to (n, heads, d)."""
    return x[0].transpose(0, 1)


def _flash_window(block: Block) -> tuple[int, int]:
    """Returns how many keys before and after its own position a query attends to; -1: all."""
    return (-1, 0) if block.causal else (-1, -1)


ON_CPU = Kernel(_cpu_forward, _cpu_backward)
FLASH = Kernel(_flash_forward, _flash_backward)
