"""Attention over packed rows (padding-free), with sequences isolated from each other on every device.

transformers looks attention functions up by name; the one in this module is registered as `PACKED`. It reads
the boundaries of the sequences from the model's keyword argument `packing`, so no mask over the row is ever
built. If torch has a varlen kernel for the inputs (`has_varlen_kernel`), the whole row is one call; otherwise
each sequence is one call of scaled_dot_product_attention. models/self_check.py tests whether a model passes
these arguments to its attention.

Under sequence parallelism each rank has a slice of the row's tokens. There are three modes: an all-to-all
exchanges slices of all heads for whole rows of some heads (DeepSpeed-Ulysses,
https://arxiv.org/abs/2309.14509); keys and values are passed from rank to rank (models/ring.py); or each rank
gathers the keys and values of the whole row for the queries of its slice, some heads at a time (context
parallelism in section 3.3.2 of https://arxiv.org/abs/2407.21783). In the last mode a chunk may begin inside a
sequence; its queries are then the last tokens of its keys.
"""

import importlib.util
import logging
import traceback
from collections.abc import Callable
from functools import partial
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
from openrlhf.errors import ErrorCode, UsageError, warn_once
from openrlhf.models.prefixes import Branches
from openrlhf.models.ring import ring_attention
from openrlhf.models.sequence_parallel import Packing, RowShard, SequenceParallel
from openrlhf.models.varlen import varlen_attention
from openrlhf.types import not_none

PACKED = "openrlhf_packed"

FROM_POSITIONS = ("sdpa", "eager")
"""transformers' own implementations that isolate sequences by a block mask built from restarting positions:
correct, but quadratic in the length of the whole row."""

AMPERE = (8, 0)
"""Minimum CUDA compute capability of FlashAttention."""

SCORES_BYTES = 256 * 2**20
"""Maximum size in bytes of the float32 scores of one block of queries, if scores are computed explicitly."""

MAX_HEAD_SIZE = 256
"""Maximum head size of FlashAttention, which also requires a multiple of 8 and equal sizes of queries, keys
and values."""

logger = logging.getLogger(__name__)


class CannotPack(ValueError):
    """Raised if an architecture needs a feature that attention over packed rows does not support."""


def resolve_attention(name: str, model_config: PreTrainedConfig) -> str:
    """Returns transformers' name of the attention that `--ds.attn_implementation` selects. Raises UsageError
    for implementations that do not support packed rows."""
    if name in ("auto", PACKED) or lacks_its_kernel(name):
        return PACKED
    cap = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    if name == "sdpa" and cap:
        text = f"the model caps its attention scores at {cap:g}, and sdpa has no cap.\nUse auto."
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--ds.attn_implementation", value=name)
    if problem := next(row_attention(name), None):
        raise UsageError(problem.code, problem.text, flag=f"--{problem.key}", value=name)
    return name


def of_text(name: str, model_config: PreTrainedConfig) -> str | dict[str, str]:
    """Returns transformers' setting that applies the attention `name` to the whole model except its vision
    tower."""
    return {"": name, "text_config": name} if "vision_config" in model_config.sub_configs else name


def lacks_its_kernel(name: str) -> bool:
    """Returns True if `name` is a FlashAttention implementation that this machine cannot run; `auto` then
    replaces it. The checks of flags have already reported a missing package."""
    package = FLASH_PACKAGES.get(name)
    if package is None:
        return False
    if importlib.util.find_spec(package) is None:
        return True
    if reason := _why_no_flash():
        logger.warning("--ds.attn_implementation %s: %s, so auto replaces it", name, reason)
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
    branches: Branches | None = None,
) -> dict:
    """Returns the keyword arguments, besides restarting positions, that keep the model's attention inside
    sequences. Only `PACKED` supports `sharing`, and `branches`, the keys of a tree of prefixes."""
    if implementation in FROM_POSITIONS:
        return {}
    packing, longest = Packing.of(lengths, device), max(lengths)
    if implementation == PACKED:
        shard = None if sharing is None else RowShard.of(sharing, lengths, device)
        return {"packing": packing._replace(shard=shard, branches=branches)}
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
    """Computes attention over a packed row: (1, heads, N, d) -> (1, N, heads, d).

    attention_mask: the result of `_window_of_layer` for the layer. softcap: scores s become c tanh(s / c).
    s_aux: (heads,) attention sinks, one score per head that takes part in the softmax and has no value.
    """
    if packing is None:
        raise CannotPack(
            f"{type(module).__name__} does not pass the boundaries of sequences to its attention"
        )
    if attention_mask is not None and attention_mask.numel() != 1:
        raise CannotPack(f"{type(module).__name__} builds its own mask over the row")
    window = sliding_window if attention_mask is None else int(attention_mask)
    attend = partial(_attend, scaling=scaling, dropout=dropout, window=window, softcap=softcap)
    if packing.shard is None:
        return _over_whole_row(attend, query, key, value, s_aux, packing), None
    if packing.shard.sharing.splits_heads(query.shape[1], key.shape[1]):
        return _with_own_heads(attend, query, key, value, s_aux, packing), None
    if packing.branches is not None:
        raise CannotPack("only --ds.sequence_parallel_mode ulysses supports common prefixes")
    sharing = packing.shard.sharing
    if sharing.mode != "allgather":
        reason = why_no_ring(query, value, window=window, softcap=softcap, sinks=s_aux, dropout=dropout)
        if not reason:
            return _by_ring(query, key, value, scaling, packing.shard), None
        if sharing.mode == "ring" and sharing.rank == 0:
            mode = "--ds.sequence_parallel_mode ring"
            warn_once(logger, f"{mode}: layers with {reason} use mode allgather")
    return _over_gathered_keys(attend, query, key, value, s_aux, packing.shard), None


def broke_attention(error: Exception) -> bool:
    """Returns True if `error` was raised inside `packed_attention` by a kernel, and is not a CannotPack."""
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
    """Returns the reason why a layer cannot use ring attention; "" if it can. The result is the same on all
    ranks."""
    reasons = {
        "a sliding window": window is not None,
        "capped scores": softcap is not None,
        "attention sinks": sinks is not None,
        "dropout": dropout > 0,
        "no FlashAttention on the GPU": query.is_cuda and not has_varlen_kernel(query, value, dropout),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def _over_whole_row(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    packing: Packing,
) -> Tensor:
    """Computes `packed_attention` for all tokens of a row, or of the tree of its prefixes."""
    if packing.branches is None:
        return attend(query, key, value, sinks, packing, packing)
    key, value = map(packing.branches.repeated, (key, value))
    return attend(query, key, value, sinks, packing, packing.branches.keys)


def _with_own_heads(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    packing: Packing,
) -> Tensor:
    """Computes `packed_attention` for this rank's slice of a row by exchanging heads (DeepSpeed-Ulysses)."""
    sharing = not_none(packing.shard).sharing
    keys = (x.repeat_interleave(sharing.copies(x.shape[1]), dim=1) for x in (key, value))
    q, k, v = (sharing.whole_row(x[0])[None] for x in (query, *keys))
    if sinks is not None:
        sinks = sinks[sharing.own_heads(len(sinks))]
    return sharing.all_heads(_over_whole_row(attend, q, k, v, sinks, packing)[0])[None]


def _over_gathered_keys(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    shard: RowShard,
) -> Tensor:
    """Computes `packed_attention` for this rank's slice of a row over keys and values gathered from all
    ranks."""
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


def _by_ring(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, shard: RowShard) -> Tensor:
    """Computes `packed_attention` for this rank's slice of a row by ring attention."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = _pad_to_kernel_size(query, key, value)
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
    """Computes attention of queries (1, heads, n, d). Returns (1, n, heads, d). The queries of a sequence are
    the last tokens of its keys."""
    plain = softcap is None and sinks is None
    if plain and has_varlen_kernel(query, value, dropout):
        return _varlen(query, key, value, queries, keys, scaling, window)
    # split instead of slices, because the backward pass of each slice would touch the whole row
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
        # With fewer key heads torch would fall back to the kernel that materializes the scores of all pairs
        # of tokens.
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
    """Computes attention with explicit scores, for architectures that modify them. It processes one block of
    queries at a time and recomputes the block's scores in the backward pass, so that memory stays linear in
    the length of a sequence."""
    k, v = _as_many_heads(q, k, v)
    length, start = k.shape[2], k.shape[2] - q.shape[2]
    blocks = q.split(max(1, SCORES_BYTES // (4 * q.shape[1] * length)), 2)
    if len(blocks) == 1:
        return _scored(q, k, v, start, scaling, dropout, window, softcap, sinks)
    outputs = []
    for block in blocks:
        end = start + block.shape[2]
        first = 0 if window is None else max(0, start - window + 1)  # first key in the block's window
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
    """Computes attention of the queries of consecutive tokens. The first query is at index `place` among the
    keys."""
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
    """Returns a mask (L, S), True if a query attends to a key. The first query is at index `place` among the
    keys."""
    i, j = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
    distance = place + i[:, None] - j
    return (distance >= 0) & (distance < (window or k.shape[2]))


def has_varlen_kernel(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Returns True if torch's varlen attention, which is FlashAttention 2 on CUDA, supports these inputs."""
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
    q, k, v = (x[0].transpose(0, 1) for x in _pad_to_kernel_size(q, k, v))  # (N, heads, d)
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


def _pad_to_kernel_size(*qkv: Tensor) -> list[Tensor]:
    """Pads head dimensions with zeros to the size that kernels need: the same for queries, keys and values,
    and a multiple of 8. Zeros in queries and keys do not change the scores. The caller removes the padding
    from the outputs."""
    size = -(-max(x.shape[-1] for x in qkv) // 8) * 8
    return [x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in qkv]


def _window_of_layer(
    *args: Any,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Returns the layer's sliding window in tokens, the only property of its mask that packed attention
    needs; None: no window. The result is a tensor with one element, because models pass the mask on as a
    tensor."""
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
    """Removes the positions from the arguments of a mask. Otherwise transformers would wait for the GPU to
    determine from them whether a row has several sequences, which `packing` already contains."""
    if config._attn_implementation == PACKED:
        position_ids = None
    return _arguments_of_mask(
        config, inputs_embeds, attention_mask, past_key_values, position_ids, *more, **named
    )


# pyrefly: ignore[bad-assignment]  the arguments that are only handed on have no names here
masking_utils._preprocess_mask_arguments = _arguments_of_packed_mask
ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, _window_of_layer)
