"""torch's attention over concatenated sequences, which is FlashAttention 2 on CUDA."""

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
    """Computes attention within the sequences of q, k and v, each (N, heads, d), where k and v may have fewer
    heads. Returns the output and the log-sum-exp of the scores (heads, N).

    window_size: how many keys before and after its own position a query sees; -1: all.
    """
    varlen = torch_varlen()
    output, lse = varlen.varlen_attn(
        *(q, k, v, queries.cumulative, keys.cumulative, max(queries.lengths), max(keys.lengths)),
        return_aux=varlen.AuxRequest(lse=True),
        scale=scale,
        window_size=window_size,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return output, lse


def torch_varlen():
    """Imports torch's module, which registers its operators, and the compiler with it, which takes a
    second."""
    import torch.nn.attention.varlen

    return torch.nn.attention.varlen
