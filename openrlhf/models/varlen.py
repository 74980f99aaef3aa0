"""torch's attention over sequences that lie end to end, which is FlashAttention 2 on CUDA."""

import inspect
from functools import cache
from typing import Any

from torch import Tensor

from openrlhf.models.sequence_parallel import Packing


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Packing,
    keys: Packing,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """(N, heads, d) each, k and v with heads that may be fewer -> the output, and the log-sum-exp of the
    scores (heads, N).

    window_size: how many keys before and behind its own a query sees; -1: all.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # takes a second: it imports the compiler

    options: dict[str, Any] = {"return_aux": AuxRequest(lse=True), "scale": scale, "window_size": window_size}
    if _asks_for_groups(varlen_attn):
        options["enable_gqa"] = k.shape[1] != q.shape[1]
    output, lse = varlen_attn(
        q,
        k,
        v,
        queries.cumulative,
        keys.cumulative,
        max(queries.lengths),
        max(keys.lengths),
        **options,
    )
    return output, lse


@cache
def _asks_for_groups(varlen_attn: Any) -> bool:
    """Whether it must be told of fewer heads of keys: torch 2.13's must, 2.11's takes them and has no
    parameter for it."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
