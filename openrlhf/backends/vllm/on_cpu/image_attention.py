"""Adds bidirectional attention among the tokens of an image (Gemma 3) to vLLM's CPU workers, whose attention
backend supports only causal attention.

vLLM passes the positions of images to its attention backends, but only the GPU kernels read them. On a CPU
this module calls the kernel a second time, without the causal mask, for the tokens of images: each image is a
sequence that ends with the image, and the image's tokens are its queries. The result replaces the causal one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn


class _Images(NamedTuple):
    """The images of an engine step, each as a separate sequence."""

    rows: Tensor  # indices of image tokens among the step's tokens
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    scheduler_metadata: Tensor


def patch_image_attention() -> None:
    """Patches vLLM's CPU attention in this process, so that the tokens of an image attend to the whole
    image."""
    builder, backend = cpu_attn.CPUAttentionMetadataBuilder, cpu_attn.CPUAttentionBackendImpl
    build, forward = builder.build, backend.forward

    def build_with_images(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        metadata: Any = build(self, common_prefix_len, common_attn_metadata, fast_build)
        metadata.mm_prefix_range = _images(self, common_attn_metadata)  # the attribute that GPU backends use
        return metadata

    def attend(
        self: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any,
        output: Tensor, *scales: Any, **more: Any,
    ) -> Tensor:  # fmt: skip
        whole = forward(self, layer, query, key, value, cache, metadata, output, *scales, **more)
        if (images := getattr(metadata, "mm_prefix_range", None)) is not None:
            output[images.rows] = _attend_bidirectionally(self, layer, query[images.rows], cache, images)
        return whole

    builder.build, backend.forward = build_with_images, attend


def _images(builder: Any, common: Any) -> _Images | None:
    """Returns the images of an engine step; None without images."""
    starts, lengths = common.query_start_loc.tolist(), common.seq_lens.tolist()
    found = []
    for request, spans in (common.mm_req_doc_ranges or {}).items():
        before = lengths[request] - (starts[request + 1] - starts[request])  # read in earlier steps
        for start, end in spans:
            first = max(start, before)
            if first <= end < lengths[request]:
                found.append((request, starts[request] + first - before, end + 1 - first, end + 1))
    if not found:
        return None
    requests, places, counts, seq_lens = map(torch.tensor, zip(*found, strict=True))
    query_start_loc = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(common.query_start_loc.dtype)
    seq_lens = seq_lens.to(common.seq_lens.dtype)
    return _Images(
        rows=torch.cat(
            [torch.arange(p, p + n) for p, n in zip(places.tolist(), counts.tolist(), strict=True)]
        ),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=common.block_table_tensor[requests].contiguous(),
        scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(found),
            num_heads=builder.num_heads,
            num_kv_heads=builder.num_kv_heads,
            head_dim=builder.head_dim,
            seq_lens=seq_lens,
            dtype=builder.dtype,
            query_start_loc=query_start_loc,
            causal=False,
            sliding_window_size=builder.window_size,
            isa=builder.isa,
            enable_kv_split=False,
            dynamic_causal=None,
            kv_cache_dtype=builder.kv_cache_dtype,
        ),
    )


def _attend_bidirectionally(
    backend: Any, layer: Any, query: Tensor, cache: Tensor, images: _Images
) -> Tensor:
    num_blocks, num_kv_heads, block_size, _ = cache.size()
    key_cache, value_cache = cache.view(num_blocks, num_kv_heads, block_size * 2, -1).chunk(2, dim=2)
    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=images.query_start_loc,
        seq_lens=images.seq_lens,
        scale=backend.scale,
        causal=False,
        alibi_slopes=backend.alibi_slopes,
        sliding_window=backend.sliding_window,
        block_table=images.block_table,
        softcap=backend.logits_soft_cap,
        scheduler_metadata=images.scheduler_metadata,
        s_aux=backend.sinks,
        dynamic_causal=None,
        k_scale=layer._k_scale_float,
        v_scale=layer._v_scale_float,
        kv_cache_dtype=backend.kv_cache_dtype,
    )
    return output
