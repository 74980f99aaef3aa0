"""Attention over packed rows. One registered implementation isolates sequences on every device.

transformers looks attention up by name; ours is `PACKED`. It reads where the sequences lie from
the `packing` keyword that the model is called with, so no mask is ever built. On CPU and in float32 each
sequence is one call of scaled_dot_product_attention; on CUDA in half precision the whole row is one call of
torch's varlen kernel.
"""

import importlib.util
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PACKED = "openrlhf_packed"

FROM_POSITIONS = ("sdpa", "eager")
"""transformers' own implementations that isolate sequences by a block mask built from restarting positions:
right, and quadratic in the length of the whole row."""

FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Implementations that isolate sequences by cumulative lengths, and the package that each needs."""

ISOLATING_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layer, as `config.layer_types` names them, whose state does not run on from one sequence to the
next."""


class Packing(NamedTuple):
    """Where the sequences of a row lie. Travels through the model to the attention as `packing`."""

    lengths: tuple[int, ...]
    cumulative: Tensor  # (B + 1,) int32, on the row's device


def resolve_attention(name: str, model_config) -> str:
    """The transformers name for `--ds.attn_implementation`. Refuses what would leak between packed
    sequences."""
    check_isolating(model_config)
    if name in ("auto", PACKED):
        return PACKED
    if name in FROM_POSITIONS or name.startswith("kernels-community/"):
        return name
    if package := FLASH_PACKAGES.get(name):
        if importlib.util.find_spec(package) and torch.cuda.is_available():
            return name
        raise ValueError(
            f"--ds.attn_implementation {name} needs a CUDA device and the package {package}, and one is "
            "missing.\n"
            f"Use --ds.attn_implementation auto: it takes the fastest kernel that this machine has."
        )
    raise ValueError(
        f"--ds.attn_implementation {name} is not known to keep packed sequences apart.\n"
        f"Use auto, {', '.join((*FROM_POSITIONS, *FLASH_PACKAGES))} or a kernels-community/ name."
    )


def check_isolating(model_config) -> None:
    """Raise where a layer carries state along the row, as linear attention and state-space layers do."""
    text_config = model_config.get_text_config()
    kinds = set(getattr(text_config, "layer_types", None) or ()) - ISOLATING_LAYERS
    if kinds:
        raise ValueError(
            f"the model has layers of type {', '.join(sorted(kinds))}, whose state would run on from one\n"
            "packed sequence into the next. "
            f"Use a model whose layers are all {' or '.join(sorted(ISOLATING_LAYERS))}."
        )


def packing_kwargs(implementation: str, lengths: tuple[int, ...], device: torch.device) -> dict:
    """What the model must be called with, beside restarting positions, so that attention stays inside
    sequences."""
    if implementation in FROM_POSITIONS:
        return {}
    cumulative = torch.tensor((0, *lengths), device=device).cumsum(0, dtype=torch.int32)
    if implementation == PACKED:
        return {"packing": Packing(lengths, cumulative)}
    longest = max(lengths)
    return {
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packing: Packing | None = None,
    **unused,
) -> tuple[Tensor, None]:
    """(1, heads, N, d) -> (1, N, heads, d). Without `packing` (text generation by transformers): plain
    SDPA."""
    if softcap is not None or s_aux is not None:
        raise ValueError(
            "this model caps attention scores or has attention sinks, which the packed kernels cannot do.\n"
            "Use --ds.attn_implementation eager."
        )
    if packing is None:
        if attention_mask is None and query.shape[2] == key.shape[2]:  # where `_no_mask` made no mask
            whole = _one_sequence(query, key, value, scaling, dropout, sliding_window)
            return whole.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **unused
        )
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen(query, key, value, packing, scaling, sliding_window), None
    # split, not slices: the backward of a slice touches the whole row once for every sequence
    rows = zip(*(x.split(packing.lengths, 2) for x in (query, key, value)), strict=True)
    outputs = [_one_sequence(q, k, v, scaling, dropout, sliding_window) for q, k, v in rows]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, scaling, dropout, window: int | None) -> Tensor:
    mask = None
    if window is not None and q.shape[2] > window:
        i = torch.arange(q.shape[2], device=q.device)
        distance = i[:, None] - i
        mask = (distance >= 0) & (distance < window)
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout, enable_gqa=grouped
    )


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (N, heads, d)
    causal_window = (-1 if window is None else window - 1, 0)
    output = varlen_attn(
        q,
        k,
        v,
        packing.cumulative,
        packing.cumulative,
        max(packing.lengths),
        max(packing.lengths),
        scale=scaling,
        window_size=causal_window,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return cast(Tensor, output)[None]  # a tuple only where the log-sum-exp is asked for too


def _no_mask(*args, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs):
    """A packed row needs no mask; generation with a cache, or with padding, needs SDPA's."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, q_length=q_length, kv_length=kv_length, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, _no_mask)
