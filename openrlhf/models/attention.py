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
from functools import partial
from typing import Any, NamedTuple, Self

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
from openrlhf.models.packing import Packing
from openrlhf.models.prefixes import Branches
from openrlhf.models.ring import ring_attention
from openrlhf.models.sequence_parallel import RowShard, SequenceParallel
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


class RowPacking(NamedTuple):
    """The row as `PACKED` sees it. The model passes it to its attention as the keyword argument `packing`."""

    sequences: Packing
    shard: RowShard | None = None
    """This rank's slice; None if it has the whole row."""
    branches: Branches | None = None
    """The keys of the queries where the row is a tree of prefixes; None where the keys are the queries."""


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
        return {"packing": RowPacking(packing, shard, branches)}
    return {
        "cu_seq_lens_q": packing.cumulative,
        "cu_seq_lens_k": packing.cumulative,
        "max_length_q": longest,
        "max_length_k": longest,
    }


class Scoring(NamedTuple):
    """How a layer turns scores of queries and keys into its output."""

    scaling: float | None = None
    """Factor of the scores; None: 1 / sqrt(head size)."""
    dropout: float = 0.0
    window: int | None = None
    """Sliding window in tokens; None: no window."""
    softcap: float | None = None
    """Scores s become c tanh(s / c)."""
    sinks: Tensor | None = None
    """(heads,) attention sinks: one score per head that takes part in the softmax and has no value."""

    def scale(self, query: Tensor) -> float:
        return query.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    def of_heads(self, heads: slice) -> Self:
        return self if self.sinks is None else self._replace(sinks=self.sinks[heads])


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
    packing: RowPacking | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Computes attention over a packed row: (1, heads, N, d) -> (1, N, heads, d), with transformers' names of
    the arguments. attention_mask: the result of `_window_of_layer` for the layer."""
    if packing is None:
        raise CannotPack(
            f"{type(module).__name__} does not pass the boundaries of sequences to its attention"
        )
    if attention_mask is not None and attention_mask.numel() != 1:
        raise CannotPack(f"{type(module).__name__} builds its own mask over the row")
    window = sliding_window if attention_mask is None else int(attention_mask)
    scoring = Scoring(scaling, dropout, window, softcap, s_aux)
    if packing.shard is None:
        return _over_whole_row(query, key, value, packing, scoring), None
    if packing.shard.sharing.splits_heads(query.shape[1], key.shape[1]):
        return _with_own_heads(query, key, value, packing, scoring), None
    if packing.branches is not None:
        raise CannotPack("only --ds.sequence_parallel_mode ulysses supports common prefixes")
    sharing = packing.shard.sharing
    if sharing.mode != "allgather":
        reason = why_no_ring(query, value, scoring)
        if not reason:
            return _by_ring(query, key, value, scoring.scale(query), packing.shard), None
        if sharing.mode == "ring" and sharing.rank == 0:
            mode = "--ds.sequence_parallel_mode ring"
            warn_once(logger, f"{mode}: layers with {reason} use mode allgather")
    return _over_gathered_keys(query, key, value, packing.shard, scoring), None


def broke_attention(error: Exception) -> bool:
    """Returns True if `error` was raised inside `packed_attention` by a kernel, and is not a CannotPack."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return packed_attention.__code__ in frames and not isinstance(error, CannotPack)


def why_no_ring(query: Tensor, value: Tensor, scoring: Scoring) -> str:
    """Returns the reason why a layer cannot use ring attention; "" if it can. The result is the same on all
    ranks."""
    has_kernel = has_varlen_kernel(query, value, scoring.dropout)
    reasons = {
        "a sliding window": scoring.window is not None,
        "capped scores": scoring.softcap is not None,
        "attention sinks": scoring.sinks is not None,
        "dropout": scoring.dropout > 0,
        "no FlashAttention on the GPU": query.is_cuda and not has_kernel,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def _over_whole_row(
    query: Tensor, key: Tensor, value: Tensor, packing: RowPacking, scoring: Scoring
) -> Tensor:
    """Computes `packed_attention` for all tokens of a row, or of the tree of its prefixes."""
    sequences, branches = packing.sequences, packing.branches
    if branches is None:
        return _attend(query, key, value, sequences, sequences, scoring)
    key, value = map(branches.repeated, (key, value))
    return _attend(query, key, value, sequences, branches.keys, scoring)


def _with_own_heads(
    query: Tensor, key: Tensor, value: Tensor, packing: RowPacking, scoring: Scoring
) -> Tensor:
    """Computes `packed_attention` for this rank's slice of a row by exchanging heads (DeepSpeed-Ulysses)."""
    sharing = not_none(packing.shard).sharing
    keys = (x.repeat_interleave(sharing.copies(x.shape[1]), dim=1) for x in (key, value))
    q, k, v = (sharing.whole_row(x[0])[None] for x in (query, *keys))
    own = scoring.of_heads(sharing.own_heads(query.shape[1]))
    return sharing.all_heads(_over_whole_row(q, k, v, packing, own)[0])[None]


def _over_gathered_keys(
    query: Tensor, key: Tensor, value: Tensor, shard: RowShard, scoring: Scoring
) -> Tensor:
    """Computes `packed_attention` for this rank's slice of a row over keys and values gathered from all
    ranks."""
    num_kv, step, key_size = key.shape[1], shard.sharing.heads_at_a_time, key.shape[3]
    per_kv, outputs = query.shape[1] // num_kv, []
    own = torch.cat([key, value], dim=-1)[0].transpose(0, 1)  # (n, heads, d): one message for both
    for head in range(0, num_kv, step):
        whole = shard.sharing.gathered(own[:, head : head + step]).transpose(0, 1)[None]
        heads = slice(head * per_kv, (head + step) * per_kv)
        of_chunks = []
        for chunk, q in zip(shard.chunks, query[:, heads].chunk(2, 2), strict=True):
            k, v = whole[:, :, chunk.seen].tensor_split((key_size,), -1)
            of_chunks.append(_attend(q, k, v, chunk.queries, chunk.keys, scoring.of_heads(heads)))
        outputs.append(torch.cat(of_chunks, dim=1))
    return torch.cat(outputs, dim=2)


def _by_ring(query: Tensor, key: Tensor, value: Tensor, scale: float, shard: RowShard) -> Tensor:
    """Computes `packed_attention` for this rank's slice of a row by ring attention."""
    q, k, v = _pad_to_kernel_size(query, key, value)
    output = ring_attention(q, k, v, shard, scale, flash=query.is_cuda).transpose(1, 2)
    return output[..., : value.shape[-1]].contiguous()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scoring: Scoring
) -> Tensor:
    """Computes attention of queries (1, heads, n, d). Returns (1, n, heads, d). The queries of a sequence are
    the last tokens of its keys."""
    plain = scoring.softcap is None and scoring.sinks is None
    if plain and has_varlen_kernel(query, value, scoring.dropout):
        return _varlen(query, key, value, queries, keys, scoring)
    # split instead of slices, because the backward pass of each slice would touch the whole row
    rows = zip(
        query.split(queries.lengths, 2), *(x.split(keys.lengths, 2) for x in (key, value)), strict=True
    )
    of_sequence = _one_sequence if plain else _with_scores
    outputs = [of_sequence(q, k, v, scoring) for q, k, v in rows]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    length, earlier = k.shape[2], k.shape[2] - q.shape[2]
    sees_all = scoring.window is None or length <= scoring.window
    mask = None if sees_all and not earlier else _causal(q, k, earlier, scoring.window)
    grouped = k.shape[1] != q.shape[1]
    if grouped and q.is_cuda:
        # With fewer key heads torch would fall back to the kernel that materializes the scores of all pairs
        # of tokens.
        k, v = _as_many_heads(q, k, v)
        grouped = False
    options: dict[str, Any] = {"scale": scoring.scaling, "dropout_p": scoring.dropout, "enable_gqa": grouped}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **options)


def _with_scores(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Computes attention with explicit scores, for architectures that modify them. It processes one block of
    queries at a time and recomputes the block's scores in the backward pass, so that memory stays linear in
    the length of a sequence."""
    k, v = _as_many_heads(q, k, v)
    length, start, window = k.shape[2], k.shape[2] - q.shape[2], scoring.window
    blocks = q.split(max(1, SCORES_BYTES // (4 * q.shape[1] * length)), 2)
    if len(blocks) == 1:
        return _scored(q, k, v, start, scoring)
    score = partial(checkpoint, _scored, use_reentrant=False, preserve_rng_state=scoring.dropout > 0)
    outputs = []
    for block in blocks:
        end = start + block.shape[2]
        first = 0 if window is None else max(0, start - window + 1)  # first key in the block's window
        outputs.append(score(block, k[:, :, first:end], v[:, :, first:end], start - first, scoring))
        start = end
    return torch.cat(outputs, dim=2)


def _scored(q: Tensor, k: Tensor, v: Tensor, place: int, scoring: Scoring) -> Tensor:
    """Computes attention of the queries of consecutive tokens. The first query is at index `place` among the
    keys."""
    scores = q @ k.transpose(2, 3) * scoring.scale(q)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.float().masked_fill(~_causal(q, k, place, scoring.window), float("-inf"))
    if scoring.sinks is not None:
        sink = scoring.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(q.dtype)
    return F.dropout(weights, scoring.dropout) @ v


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


def _varlen(q: Tensor, k: Tensor, v: Tensor, queries: Packing, keys: Packing, scoring: Scoring) -> Tensor:
    scale, value_size = scoring.scale(q), v.shape[-1]
    q, k, v = (x[0].transpose(0, 1) for x in _pad_to_kernel_size(q, k, v))  # (N, heads, d)
    window = (-1 if scoring.window is None else scoring.window - 1, 0)
    output, _ = varlen_attention(q, k, v, queries, keys, scale=scale, window_size=window)
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
