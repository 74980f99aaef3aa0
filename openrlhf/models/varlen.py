"""torch's attention over concatenated sequences, which is FlashAttention 2 on CUDA."""

import inspect
from functools import cache
from typing import Any

from torch import Tensor

from openrlhf.models.packing import Packing


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
    """Computes attention within the sequences of q, k and v, each (N, heads, d), where k and v may have fewer
    heads. Returns the output and the log-sum-exp of the scores (heads, N).

    window_size: how many keys before and after its own position a query sees; -1: all.
    """
    varlen = torch_varlen()
    options: dict[str, Any] = {"scale": scale, "window_size": window_size}
    if _asks_for_groups(varlen.varlen_attn):
        options["enable_gqa"] = k.shape[1] != q.shape[1]
    output, lse = varlen.varlen_attn(
        *(q, k, v, queries.cumulative, keys.cumulative, max(queries.lengths), max(keys.lengths)),
        return_aux=varlen.AuxRequest(lse=True),
        **options,
    )
    return output, lse


def torch_varlen():
    """Imports torch's module, which registers its operators, and the compiler with it, which takes a
    second."""
    import torch.nn.attention.varlen

    return torch.nn.attention.varlen


@cache
def _asks_for_groups(varlen_attn: Any) -> bool:
    """Returns True if `varlen_attn` has the parameter `enable_gqa`, which torch 2.13 requires for fewer key
    heads than query heads. torch 2.11, on which the GPU kit has run, accepts them without it."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
