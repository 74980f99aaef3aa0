"""Attention over packed rows (padding-free). A registered implementation isolates sequences on every device.

transformers looks attention up by name; ours is `PACKED`. It reads where the sequences lie from
the `packing` keyword that the model is called with, so no mask over the row is ever built. On CPU and in
float32 each sequence is one call of scaled_dot_product_attention; on CUDA in half precision the whole row is
one call of torch's varlen kernel. Whether a model hands all of this on to its attention is found out by
models/self_check.py.
"""

import importlib.util
import logging
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from openrlhf.config.checks import row_attention
from openrlhf.config.choices import FLASH_PACKAGES

PACKED = "openrlhf_packed"

FROM_POSITIONS = ("sdpa", "eager")
"""transformers' own implementations that isolate sequences by a block mask built from restarting positions:
right, and quadratic in the length of the whole row."""

logger = logging.getLogger(__name__)


class CannotPack(ValueError):
    """An architecture asks for what attention over packed rows cannot do."""


class Packing(NamedTuple):
    """Where the sequences of a row lie. Travels through the model to the attention as `packing`."""

    lengths: tuple[int, ...]
    cumulative: Tensor  # (B + 1,) int32, on the row's device


def resolve_attention(name: str, model_config: PreTrainedConfig) -> str:
    """The transformers name for `--ds.attn_implementation`. Refuses names that no packed row is read with."""
    if name in ("auto", PACKED) or lacks_its_kernel(name):
        return PACKED
    cap = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    if name == "sdpa" and cap:
        raise ValueError(
            f"--ds.attn_implementation sdpa: the model caps its attention scores at {cap:g}, which this "
            "leaves out.\nUse --ds.attn_implementation auto."
        )
    if problem := next(row_attention(name), None):
        raise ValueError(f"--{problem.key} {name}: {problem.text}")
    return name


def lacks_its_kernel(name: str) -> bool:
    """Whether it is a flash attention that this machine cannot run: `auto` takes its place. That its package
    is not installed was said when the flags were checked."""
    package = FLASH_PACKAGES.get(name)
    if package is None or (importlib.util.find_spec(package) and torch.cuda.is_available()):
        return False
    if importlib.util.find_spec(package):
        logger.warning("--ds.attn_implementation %s: there is no CUDA device, auto takes its place", name)
    return True


def packing_kwargs(implementation: str, lengths: tuple[int, ...], device: torch.device) -> dict:
    """What the model must be called with, beside restarting positions, so that attention stays inside
    sequences."""
    if implementation in FROM_POSITIONS:
        return {}
    # Computed here: copying a list to a GPU would wait for it.
    cumulative = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
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
    module: nn.Module,
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
    **unused: Any,
) -> tuple[Tensor, None]:
    """(1, heads, N, d) -> (1, N, heads, d).

    attention_mask: what `_window_of_layer` made of the layer's mask. softcap: scores s become c tanh(s / c).
    s_aux: (heads,) attention sinks, a score per head that takes part in the softmax and has no value.
    """
    if packing is None:
        raise CannotPack(
            f"{type(module).__name__} called its attention without saying where the sequences of the row lie"
        )
    if attention_mask is not None and attention_mask.numel() != 1:
        raise CannotPack(f"{type(module).__name__} makes a mask of its own over the row")
    window = sliding_window if attention_mask is None else int(attention_mask)
    plain = softcap is None and s_aux is None
    if plain and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen(query, key, value, packing, scaling, window), None
    # split, not slices: the backward of a slice touches the whole row once for every sequence
    rows = zip(*(x.split(packing.lengths, 2) for x in (query, key, value)), strict=True)
    if plain:
        outputs = [_one_sequence(q, k, v, scaling, dropout, window) for q, k, v in rows]
    else:
        outputs = [_with_scores(q, k, v, scaling, dropout, window, softcap, s_aux) for q, k, v in rows]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _one_sequence(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    mask = None if window is None or q.shape[2] <= window else _causal(q, window)
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout, enable_gqa=grouped
    )


def _with_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Scores are computed one by one, for architectures that change them. Quadratic memory in the length of
    a sequence."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~_causal(q, window), float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(q.dtype)
    return F.dropout(weights, dropout) @ v


def _causal(q: Tensor, window: int | None) -> Tensor:
    """(L, L) True where a token of the sequence sees another."""
    i = torch.arange(q.shape[2], device=q.device)
    distance = i[:, None] - i
    return (distance >= 0) & (distance < (window or len(i)))


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
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


def _window_of_layer(
    *args: Any,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """All that packed attention must know of a layer's mask: how far it sees, as a tensor of one element,
    because that is what models hand on. None: every earlier token of its sequence."""
    kinds = getattr(config, "layer_types", None) or ()
    if use_vmap or (local_size is not None and "chunked_attention" in kinds):
        raise CannotPack("attention masks that are neither causal nor a sliding window cannot be packed")
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)


_arguments_of_mask = masking_utils._preprocess_mask_arguments


def _arguments_of_packed_mask(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    attention_mask: Any,
    past_key_values: Any,
    position_ids: Tensor | None,
    *more: Any,
) -> tuple:
    """Without positions: transformers would wait for the GPU to see in them whether a row has several
    sequences, which `packing` says."""
    if config._attn_implementation == PACKED:
        position_ids = None
    return _arguments_of_mask(config, inputs_embeds, attention_mask, past_key_values, position_ids, *more)


# pyrefly: ignore[bad-assignment]  the arguments that are only handed on have no names here
masking_utils._preprocess_mask_arguments = _arguments_of_packed_mask
ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, _window_of_layer)
