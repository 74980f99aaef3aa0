"""vLLM's attention on CPUs among the tokens of images equals plain products of its kernel's inputs."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from openrlhf.device import DEVICE_TYPE

pytestmark = pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="the kernel is that of vLLM's build for CPUs")

HEADS, KV_HEADS, SIZE, BLOCK, NUM_BLOCKS = 4, 2, 32, 32, 6
SCALE = SIZE**-0.5
LENGTHS, BEFORE = (70, 40), (0, 10)
"""Tokens of two requests, and how many of them earlier steps have read."""
IMAGES = {0: [(5, 20), (50, 61)], 1: [(4, 15)]}
"""First and last token of each image. The last image is partly read."""
WINDOW = 24


def seen(request: int, query: int, key: int, window: int | None) -> bool:
    together = any(start <= query <= end and start <= key <= end for start, end in IMAGES[request])
    return together or (key <= query and (window is None or query - key < window))


@pytest.mark.parametrize("window", [None, WINDOW])
def test_tokens_of_an_image_see_each_other_and_all_before_it(window: int | None) -> None:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from openrlhf.backends.vllm.on_cpu.image_attention import _attend_bidirectionally, _images

    random = torch.Generator().manual_seed(0)
    keys = [torch.randn(n, KV_HEADS, SIZE, generator=random) for n in LENGTHS]
    values = [torch.randn(n, KV_HEADS, SIZE, generator=random) for n in LENGTHS]
    queries = [torch.randn(n, HEADS, SIZE, generator=random) for n in LENGTHS]
    blocks = torch.tensor([[1, 3, 5], [2, 4, 0]], dtype=torch.int32)
    slots = [blocks[r, i // BLOCK] * BLOCK + i % BLOCK for r, n in enumerate(LENGTHS) for i in range(n)]
    isa = _get_attn_isa(torch.float32, BLOCK, SIZE, "auto")
    cache = torch.zeros(NUM_BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
    halves = cache.view(NUM_BLOCKS, KV_HEADS, 2 * BLOCK, SIZE).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        torch.cat(keys), torch.cat(values), *halves, torch.tensor(slots, dtype=torch.int64), isa
    )

    builder = SimpleNamespace(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE, dtype=torch.float32, isa=isa,
        window_size=-1 if window is None else window, kv_cache_dtype="auto",
    )  # fmt: skip
    new = [n - before for n, before in zip(LENGTHS, BEFORE, strict=True)]
    common = SimpleNamespace(
        query_start_loc=torch.tensor([0, new[0], sum(new)], dtype=torch.int32),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_table_tensor=blocks,
        mm_req_doc_ranges=IMAGES,
    )
    images = _images(builder, common)
    assert images is not None
    backend = SimpleNamespace(
        scale=SCALE, alibi_slopes=None, sliding_window=builder.window_size, logits_soft_cap=0, sinks=None,
        kv_cache_dtype="auto",
    )  # fmt: skip
    layer = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)
    step = torch.cat([q[before:] for q, before in zip(queries, BEFORE, strict=True)])
    found = _attend_bidirectionally(backend, layer, step[images.rows], cache, images)

    expected: dict[int, Tensor] = {}
    for r, n in enumerate(LENGTHS):
        k, v = (x[r].repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
        mask = torch.tensor([[seen(r, i, j, window) for j in range(n)] for i in range(n)])
        scores = torch.einsum("qhd,khd->hqk", queries[r], k) * SCALE
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        output = torch.einsum("hqk,khd->qhd", weights, v)
        first = sum(new[:r])
        for start, end in IMAGES[r]:
            for i in range(max(start, BEFORE[r]), end + 1):
                expected[first + i - BEFORE[r]] = output[i]
    assert images.rows.tolist() == sorted(expected)
    wanted = torch.stack([expected[row] for row in sorted(expected)])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)  # sums of 70 products in float32


def test_a_step_without_new_tokens_of_images_has_none() -> None:
    from openrlhf.backends.vllm.on_cpu.image_attention import _images

    common = SimpleNamespace(
        query_start_loc=torch.tensor([0, 1]), seq_lens=torch.tensor([30]), mm_req_doc_ranges={0: [(5, 20)]}
    )
    assert _images(None, common) is None
    common.mm_req_doc_ranges = None
    assert _images(None, common) is None
