"""Choice of the kernel that reads a packed row, and calls of the GPU kernel by the rules of its source.

No GPU is needed: fake tensors know that they are on one, and the kernel's place is taken by its rules
(pytorch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_varlen_fwd`).
"""

from functools import partial, wraps
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import tiny_config, tiny_model
from counted_work import Work
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from openrlhf.models import attention
from openrlhf.models.attention import (
    RowPacking,
    Scoring,
    _attend,
    _one_sequence,
    has_varlen_kernel,
    lacks_its_kernel,
    packed_attention,
    why_no_ring,
)
from openrlhf.models.backbone import in_one_pass
from openrlhf.models.packing import Packing
from openrlhf.models.sequence_parallel import cut
from openrlhf.rows import PackedRow, Sample

LENGTHS = (5, 1, 7, 2)
N = sum(LENGTHS)
H100, T4 = (9, 0), (7, 5)


@pytest.fixture
def gpu(monkeypatch):
    """Returns a function that makes this machine appear to have a GPU of that compute capability."""

    def has(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")

    return has


def packing(device: str = "cpu") -> Packing:
    return Packing(LENGTHS, torch.tensor((0, *LENGTHS), device=device).cumsum(0, dtype=torch.int32))


def inputs(
    heads: int = 4, kv_heads: int = 2, size: int = 8, value_size: int | None = None, **options
) -> tuple[Tensor, ...]:
    shapes = (heads, size), (kv_heads, size), (kv_heads, value_size or size)
    return tuple(torch.randn(1, h, N, d, **options) for h, d in shapes)


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "value_size", "dropout", "expected"),
    [
        (H100, torch.bfloat16, 128, 128, 0.0, True),
        (H100, torch.float16, 128, 128, 0.0, True),
        (H100, torch.bfloat16, 192, 128, 0.0, True),
        (H100, torch.bfloat16, 256, 256, 0.0, True),
        (H100, torch.bfloat16, 512, 512, 0.0, False),
        (H100, torch.bfloat16, 128, 512, 0.0, False),
        (H100, torch.float32, 128, 128, 0.0, False),
        (H100, torch.bfloat16, 128, 128, 0.1, False),
        (T4, torch.float16, 128, 128, 0.0, False),
    ],
)
def test_where_the_varlen_kernel_runs(gpu, capability, dtype, size, value_size, dropout, expected) -> None:
    gpu(capability)
    with FakeTensorMode():
        query, _, value = inputs(size=size, value_size=value_size, dtype=dtype, device="cuda")
        assert has_varlen_kernel(query, value, dropout) is expected
    assert not has_varlen_kernel(torch.empty(1, 4, N, 8, dtype=dtype), torch.empty(1, 2, N, 8), 0.0)


def obey_rules(q: Tensor, k: Tensor, v: Tensor, cumulative: Tensor) -> None:
    """Makes every check of `mha_varlen_fwd` that a caller can fail."""
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert cumulative.dtype == torch.int32 and cumulative.is_contiguous()
    _, heads, size = q.shape
    assert size <= 256, "FlashAttention forward only supports head dimension at most 256"
    assert size % 8 == 0, "head_size must be a multiple of 8, this is ensured by padding!"
    assert k.shape == v.shape and k.shape[2] == size
    assert heads % k.shape[1] == 0


@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (5, 5), (24, 16), (16, 24), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_called_as_it_wants(monkeypatch, dtype, size: int, value_size: int) -> None:
    """torch's own operator runs on the meta device, forward and backward, without its arithmetic."""
    own, called = varlen.varlen_attn, []

    @wraps(own)
    def checked(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *args, **options):
        called.append(options)
        obey_rules(q, k, v, cu_q)
        assert cu_q is cu_k
        output, lse = own(q, k, v, cu_q, cu_k, *args, **options)
        output.register_hook(lambda grad: obey_rules(grad, k, v, cu_q))
        return output, lse

    monkeypatch.setattr(varlen, "varlen_attn", checked)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda *_: True)
    qkv = inputs(size=size, value_size=value_size, dtype=dtype, device="meta", requires_grad=True)
    output, _ = packed_attention(
        nn.Module(), *qkv, None, packing=RowPacking(packing("meta")), sliding_window=3
    )
    assert (output.shape, output.dtype) == ((1, N, 4, value_size), dtype)
    (output * torch.empty_like(output)).sum().backward()
    for x in qkv:
        assert (x.grad.shape, x.grad.dtype) == (x.shape, dtype)
    assert called[0]["window_size"] == (2, 0) and called[0]["enable_gqa"]
    assert called[0]["scale"] == size**-0.5


def of_torch_2_11(q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux, scale, window_size):
    """Stand-in for the kernel with its parameters of this release: a token sees the `left` ones before it in
    its sequence, and itself. Queries are the last tokens of the keys."""
    obey_rules(q, k, v, cu_q)
    bounds, outputs = [list(pairwise(cumulative.tolist())) for cumulative in (cu_q, cu_k)], []
    assert [max_q, max_k] == [max(end - start for start, end in of) for of in bounds]
    for of_queries, of_keys in zip(*bounds, strict=True):
        j = torch.arange(of_keys[1] - of_keys[0])
        i = j[of_queries[0] - of_queries[1] :]
        left = window_size[0] if window_size[0] >= 0 else N
        seen = (i[:, None] >= j) & (i[:, None] - j <= left)
        places = of_queries, of_keys, of_keys
        parts = (x[slice(*at)].transpose(0, 1)[None] for x, at in zip((q, k, v), places, strict=True))
        outputs.append(
            F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=True)[0]
        )
    return torch.cat(outputs, dim=1).transpose(0, 1), None


def by_the_rules(q, k, *more, enable_gqa=False, **options):
    """Stand-in with a parameter that torch 2.13 requires for grouped heads."""
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return of_torch_2_11(q, k, *more, **options)


@pytest.mark.parametrize(
    ("size", "value_size", "kv_heads"), [(8, 8, 4), (8, 8, 1), (5, 5, 2), (24, 16, 2), (16, 24, 2)]
)
@pytest.mark.parametrize("options", [{}, {"scaling": 0.3}, {"sliding_window": 3}, {"sliding_window": 1}])
@pytest.mark.parametrize("release", [of_torch_2_11, by_the_rules])
def test_the_whole_row_is_its_sequences(monkeypatch, size, value_size, kv_heads, options, release) -> None:
    """One call of the kernel equals one call of attention for each sequence, with gradients."""
    monkeypatch.setattr(varlen, "varlen_attn", release)
    found = []
    for kernel in (False, True):
        monkeypatch.setattr(attention, "has_varlen_kernel", lambda *_, kernel=kernel: kernel)
        torch.manual_seed(0)
        qkv = inputs(4, kv_heads, size, value_size, dtype=torch.float64, requires_grad=True)
        output, _ = packed_attention(nn.Module(), *qkv, None, packing=RowPacking(packing()), **options)
        (output * torch.randn(output.shape, dtype=output.dtype)).sum().backward()
        found.append((output, *(x.grad for x in qkv)))
    for one_by_one, whole in zip(*found, strict=True):
        torch.testing.assert_close(whole, one_by_one, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("with_kernel", [False, True])
@pytest.mark.parametrize(
    ("window", "softcap", "limit"), [(None, None, 1), (3, None, 1), (3, 1.5, 2), (None, 2, 1)]
)
@pytest.mark.parametrize(("start", "end"), [(0, 6), (4, 9), (8, 13), (10, 15)])
def test_queries_of_a_slice_of_a_row(monkeypatch, start, end, window, softcap, limit, with_kernel):
    """Results equal those of the same tokens in the whole row, with gradients; `limit` queries have their
    scores in memory at a time."""
    monkeypatch.setattr(varlen, "varlen_attn", by_the_rules)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda *_: with_kernel)
    monkeypatch.setattr(attention, "SCORES_BYTES", 4 * 4 * 7 * limit)
    attend = partial(_attend, scoring=Scoring(window=window, softcap=softcap))
    inside, until, seen = cut(LENGTHS, start, end)
    found, device = [], torch.device("cpu")
    for cuts in (True, False):
        torch.manual_seed(0)
        q, k, v = qkv = inputs(dtype=torch.float64, requires_grad=True)
        if cuts:
            keys = k[:, :, seen], v[:, :, seen]
            places = {"queries": Packing.of(inside, device), "keys": Packing.of(until, device)}
            output = attend(q[:, :, start:end], *keys, **places)
        else:
            output = attend(q, k, v, queries=packing(), keys=packing())[:, start:end]
        (output * torch.randn(output.shape, dtype=output.dtype)).sum().backward()
        found.append((output, *(x.grad for x in qkv)))
    for of_slice, of_row in zip(*found, strict=True):
        torch.testing.assert_close(of_slice, of_row, atol=1e-6, rtol=1e-6)  # scores are float32


@pytest.mark.parametrize(
    "options", [{"softcap": 1.5}, {"sliding_window": 3}, {"sliding_window": 3, "softcap": 2}]
)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_scores_in_blocks(monkeypatch, options, rows: int) -> None:
    """Scores in blocks equal scores at once, for a sequence of 7 and two shorter ones, which have larger
    blocks."""
    found = []
    for limit in (attention.SCORES_BYTES, 4 * 4 * 7 * rows):
        monkeypatch.setattr(attention, "SCORES_BYTES", limit)
        torch.manual_seed(0)
        qkv = inputs(dtype=torch.float64, requires_grad=True)
        sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
        output, _ = packed_attention(
            nn.Module(), *qkv, None, s_aux=sinks, packing=RowPacking(packing()), **options
        )
        (output * torch.randn(output.shape, dtype=output.dtype)).sum().backward()
        found.append((output, sinks.grad, *(x.grad for x in qkv)))
    for whole, in_blocks in zip(*found, strict=True):
        torch.testing.assert_close(in_blocks, whole, atol=1e-6, rtol=1e-6)  # scores are float32


@pytest.mark.processes
@pytest.mark.parametrize("window", [None, 64])
def test_memory_of_scores_is_linear(monkeypatch, window: int | None) -> None:
    """The largest number of bytes alive at once, forward and backward, grows with the length: with all scores
    in memory a sequence four times as long would take 16 times as much."""
    monkeypatch.setattr(attention, "SCORES_BYTES", 2**16)
    peaks = []
    for length in (512, 2048):
        qkv = [torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3)]
        where = Packing((length,), torch.empty(0))
        with Work() as work:
            output, _ = packed_attention(
                nn.Module(), *qkv, None, softcap=2.0, sliding_window=window, packing=RowPacking(where)
            )
            output.sum().backward()
        peaks.append(work.peak)
    assert peaks[1] < 4 * peaks[0]


@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "deepseek_v3", "gemma3_text", "olmo2"])
def test_architectures_obey_the_rules(monkeypatch, model_type: str) -> None:
    """Whole models call the kernel by its rules and compute the same with it."""
    model = tiny_model(tiny_config(model_type))
    model.set_attn_implementation(attention.PACKED)
    mask = torch.ones(N, dtype=torch.bool)
    samples = [Sample(token_ids=torch.arange(3, 3 + n), action_mask=mask[:n]) for n in LENGTHS]
    monkeypatch.setattr(varlen, "varlen_attn", by_the_rules)
    found = []
    for kernel in (False, True):
        monkeypatch.setattr(attention, "has_varlen_kernel", lambda *_, kernel=kernel: kernel)
        with torch.no_grad():
            found.append(in_one_pass(model, PackedRow.of(samples)))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fewer_heads_of_keys_keep_linear_memory_on_a_gpu(monkeypatch, gpu, device: str) -> None:
    """Only the memory-efficient kernel remains in float32. torch's documentation of enable_gqa: "works only
    for Flash_attention and math kernel on CUDA tensor", and the math kernel holds all scores."""
    gpu(H100)
    calls = []

    def record(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **_) -> Tensor:
        calls.append((k.shape[1], v.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    with FakeTensorMode():
        qkv = inputs(heads=8, kv_heads=2, device=device)
        for q, k, v in zip(*(x.split(LENGTHS, 2) for x in qkv), strict=True):
            _one_sequence(q, k, v, Scoring())
    expected = (8, 8, False) if device == "cuda" else (2, 2, True)
    assert calls == [expected] * len(LENGTHS)


def test_flash_attention_before_ampere_is_replaced(gpu, monkeypatch, caplog) -> None:
    """The kernel's source says: "FlashAttention only supports Ampere GPUs or newer"."""
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object())
    gpu(H100)
    assert not lacks_its_kernel("flash_attention_2")
    gpu(T4)
    assert lacks_its_kernel("flash_attention_2")
    assert "Tesla T4" in caplog.text


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, ""),
        ({"window": 8}, "a sliding window"),
        ({"softcap": 30.0}, "capped scores"),
        ({"sinks": torch.zeros(2)}, "attention sinks"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_why_a_layer_has_no_ring(more: dict[str, Any], reason: str) -> None:
    heads = torch.zeros(3, 2, 8)
    assert why_no_ring(heads, heads, Scoring(**more)) == reason
