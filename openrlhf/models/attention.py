"""Attention over packed rows (padding-free). A registered implementation isolates sequences on every device.

transformers looks attention up by name; ours is `PACKED`. It reads where the sequences lie from
the `packing` keyword that the model is called with, so no mask over the row is ever built. Where torch has a
varlen kernel for it (`has_varlen_kernel`) the whole row is one call, elsewhere each sequence is one call of
scaled_dot_product_attention. Whether a model hands all of this on to its attention is found out by
models/self_check.py.

Where ranks share a row, each comes with a slice of its tokens. Either they exchange their slices of all heads
for the whole row of some (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509), or keys and values travel
round the ranks (models/ring.py), or each gathers those of the whole row for the queries of its slice, some
heads at a time (context parallelism in section 3.3.2 of https://arxiv.org/abs/2407.21783). There the edge of
a chunk may cut a sequence: its queries are the last tokens of its keys.
"""

import importlib.util
import logging
import traceback
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from openrlhf.config.checks import row_attention
from openrlhf.config.choices import FLASH_PACKAGES
from openrlhf.models.ring import ring_attention
from openrlhf.models.sequence_parallel import Packing, RowShard, SequenceParallel
from openrlhf.models.varlen import varlen_attention
from openrlhf.types import present

PACKED = "openrlhf_packed"

FROM_POSITIONS = ("sdpa", "eager")
"""transformers' own implementations that isolate sequences by a block mask built from restarting positions:
right, and quadratic in the length of the whole row."""

AMPERE = (8, 0)
"""FlashAttention refuses GPUs of a lower compute capability."""

SCORES_BYTES = 256 * 2**20
"""What the float32 scores of one block of queries may take, where they are computed one by one."""

MAX_HEAD_SIZE = 256
"""FlashAttention's, which also wants a multiple of 8, and queries, keys and values of one size."""

logger = logging.getLogger(__name__)


class CannotPack(ValueError):
    """An architecture asks for what attention over packed rows cannot do."""


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


def of_text(name: str, model_config: PreTrainedConfig) -> str | dict[str, str]:
    """`name` as transformers takes it, for all of a model but its vision tower."""
    return {"": name, "text_config": name} if "vision_config" in model_config.sub_configs else name


def lacks_its_kernel(name: str) -> bool:
    """Whether it is a flash attention that this machine cannot run: `auto` takes its place. That its package
    is not installed was said when the flags were checked."""
    package = FLASH_PACKAGES.get(name)
    if package is None:
        return False
    if importlib.util.find_spec(package) is None:
        return True
    if reason := _why_no_flash():
        logger.warning("--ds.attn_implementation %s: %s, auto takes its place", name, reason)
    return bool(reason)


def _why_no_flash() -> str:
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < AMPERE:
        return f"{torch.cuda.get_device_name()} is older than Ampere"
    return ""


def packing_kwargs(
    implementation: str,
    lengths: tuple[int, ...],
    device: torch.device,
    sharing: SequenceParallel | None = None,
) -> dict:
    """What the model must be called with, beside restarting positions, so that attention stays inside
    sequences. `sharing` is `PACKED`'s alone."""
    if implementation in FROM_POSITIONS:
        return {}
    packing, longest = Packing.of(lengths, device), max(lengths)
    if implementation == PACKED:
        shard = None if sharing is None else RowShard.of(sharing, lengths, device)
        return {"packing": packing._replace(shard=shard)}
    return {
        "cu_seq_lens_q": packing.cumulative,
        "cu_seq_lens_k": packing.cumulative,
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
    attend = partial(_attend, scaling=scaling, dropout=dropout, window=window, softcap=softcap)
    if packing.shard is None:
        return attend(query, key, value, s_aux, packing, packing), None
    if packing.shard.sharing.splits_heads(query.shape[1], key.shape[1]):
        return _with_own_heads(attend, query, key, value, s_aux, packing), None
    sharing = packing.shard.sharing
    if sharing.mode != "allgather":
        reason = why_no_ring(query, value, window=window, softcap=softcap, sinks=s_aux, dropout=dropout)
        if not reason:
            return _round_the_ring(query, key, value, scaling, packing.shard), None
        if sharing.mode == "ring" and sharing.rank == 0:
            _say_gathered(reason)
    return _over_gathered_keys(attend, query, key, value, s_aux, packing.shard), None


def broke_attention(error: Exception) -> bool:
    """Whether it ended a forward inside `packed_attention`, and is no refusal: of a kernel, or of the call of
    one."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return packed_attention.__code__ in frames and not isinstance(error, CannotPack)


def why_no_ring(
    query: Tensor,
    value: Tensor,
    *,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> str:
    """Why keys and values of a layer cannot travel to the queries; "" where they can. All ranks say the
    same."""
    reasons = {
        "a sliding window": window is not None,
        "capped scores": softcap is not None,
        "attention sinks": sinks is not None,
        "dropout": dropout > 0,
        "no FlashAttention on the GPU": query.is_cuda and not has_varlen_kernel(query, value, dropout),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


@cache
def _say_gathered(reason: str) -> None:
    """Once."""
    logger.warning("--ds.sequence_parallel_mode ring: layers with %s gather keys, as in allgather", reason)


def _with_own_heads(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    packing: Packing,
) -> Tensor:
    """Of this rank's slice of a row, as `packed_attention`."""
    sharing = present(packing.shard).sharing
    keys = (x.repeat_interleave(sharing.copies(x.shape[1]), dim=1) for x in (key, value))
    q, k, v = (sharing.whole_row(x[0])[None] for x in (query, *keys))
    if sinks is not None:
        sinks = sinks[sharing.own_heads(len(sinks))]
    return sharing.all_heads(attend(q, k, v, sinks, packing, packing)[0])[None]


def _over_gathered_keys(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    shard: RowShard,
) -> Tensor:
    """Of this rank's slice of a row, as `packed_attention`."""
    num_kv, step, key_size = key.shape[1], shard.sharing.heads_at_a_time, key.shape[3]
    per_kv, outputs = query.shape[1] // num_kv, []
    own = torch.cat([key, value], dim=-1)[0].transpose(0, 1)  # (n, heads, d): one message for both
    for head in range(0, num_kv, step):
        whole = shard.sharing.gathered(own[:, head : head + step]).transpose(0, 1)[None]
        of_heads = slice(head * per_kv, (head + step) * per_kv)
        of_chunks = []
        for chunk, q in zip(shard.chunks, query[:, of_heads].chunk(2, 2), strict=True):
            k, v = whole[:, :, chunk.seen].tensor_split((key_size,), -1)
            of_sinks = None if sinks is None else sinks[of_heads]
            of_chunks.append(attend(q, k, v, of_sinks, chunk.queries, chunk.keys))
        outputs.append(torch.cat(of_chunks, dim=1))
    return torch.cat(outputs, dim=2)


def _round_the_ring(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, shard: RowShard
) -> Tensor:
    """Of this rank's slice of a row, as `packed_attention`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = _of_kernel_size(query, key, value)
    output = ring_attention(q, k, v, shard, scale, flash=query.is_cuda).transpose(1, 2)
    return output[..., : value.shape[-1]].contiguous()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    queries: Packing,
    keys: Packing,
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """(1, heads, n, d) -> (1, n, heads, d). The queries of a sequence are the last tokens of its keys."""
    plain = softcap is None and sinks is None
    if plain and has_varlen_kernel(query, value, dropout):
        return _varlen(query, key, value, queries, keys, scaling, window)
    # split, not slices: the backward of a slice touches the whole row once for every sequence
    rows = zip(
        query.split(queries.lengths, 2), *(x.split(keys.lengths, 2) for x in (key, value)), strict=True
    )
    if plain:
        outputs = [_one_sequence(q, k, v, scaling, dropout, window) for q, k, v in rows]
    else:
        outputs = [_with_scores(q, k, v, scaling, dropout, window, softcap, sinks) for q, k, v in rows]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _one_sequence(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    length, earlier = k.shape[2], k.shape[2] - q.shape[2]
    sees_all = window is None or length <= window
    mask = None if sees_all and not earlier else _causal(q, k, earlier, window)
    grouped = k.shape[1] != q.shape[1]
    if grouped and q.is_cuda:
        # Fewer heads of keys would leave only the kernel that holds the scores of all pairs of tokens.
        k, v = _as_many_heads(q, k, v)
        grouped = False
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
    """Scores are computed one by one, for architectures that change them: a block of queries at a time, whose
    scores the backward pass computes again, so that memory stays linear in the length of a sequence."""
    k, v = _as_many_heads(q, k, v)
    length, start = k.shape[2], k.shape[2] - q.shape[2]
    blocks = q.split(max(1, SCORES_BYTES // (4 * q.shape[1] * length)), 2)
    if len(blocks) == 1:
        return _scored(q, k, v, start, scaling, dropout, window, softcap, sinks)
    outputs = []
    for block in blocks:
        end = start + block.shape[2]
        first = 0 if window is None else max(0, start - window + 1)  # all that a query of the block sees
        keys, values = k[:, :, first:end], v[:, :, first:end]
        options = start - first, scaling, dropout, window, softcap, sinks
        outputs.append(
            checkpoint(
                _scored, block, keys, values, *options, use_reentrant=False, preserve_rng_state=dropout > 0
            )
        )
        start = end
    return torch.cat(outputs, dim=2)


def _scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: int,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Queries of neighbouring tokens, of which the first is at `place` among those of the keys."""
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~_causal(q, k, place, window), float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(q.dtype)
    return F.dropout(weights, dropout) @ v


def _as_many_heads(q: Tensor, *kv: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in kv]


def _causal(q: Tensor, k: Tensor, place: int, window: int | None) -> Tensor:
    """(L, S) True where a query sees a key. The first query is at `place` among the keys."""
    i, j = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
    distance = place + i[:, None] - j
    return (distance >= 0) & (distance < (window or k.shape[2]))


def has_varlen_kernel(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether torch's varlen attention, which is FlashAttention 2 on CUDA and has no dropout, computes
    this."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and max(query.shape[-1], value.shape[-1]) <= MAX_HEAD_SIZE
        and dropout == 0
        and torch.cuda.get_device_capability(query.device) >= AMPERE
    )


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Packing,
    keys: Packing,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    size, value_size = q.shape[-1], v.shape[-1]
    q, k, v = (x[0].transpose(0, 1) for x in _of_kernel_size(q, k, v))  # (N, heads, d)
    output, _ = varlen_attention(
        q,
        k,
        v,
        queries,
        keys,
        scale=size**-0.5 if scaling is None else scaling,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return output[None, ..., :value_size]


def _of_kernel_size(*qkv: Tensor) -> list[Tensor]:
    """Filled up with zeros to what kernels want: one size of all heads, a multiple of 8. Behind queries and
    keys they add nothing to products; what they make behind outputs is for the caller to cut off."""
    size = -(-max(x.shape[-1] for x in qkv) // 8) * 8
    return [x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in qkv]


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
    **named: Any,
) -> tuple:
    """Without positions: transformers would wait for the GPU to see in them whether a row has several
    sequences, which `packing` says."""
    if config._attn_implementation == PACKED:
        position_ids = None
    return _arguments_of_mask(
        config, inputs_embeds, attention_mask, past_key_values, position_ids, *more, **named
    )


# pyrefly: ignore[bad-assignment]  the arguments that are only handed on have no names here
masking_utils._preprocess_mask_arguments = _arguments_of_packed_mask
ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, _window_of_layer)
