"""Properties of kernels that only a CUDA device shows: attention over packed rows, heads, Liger's kernels."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openrlhf.algorithms.logprobs import linear_log_probs, rows_of_chunk, sum_of_log_probs
from openrlhf.models.attention import PACKED, Scoring, _attend, packed_attention, packing_kwargs
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.packing import Packing
from openrlhf.models.policy import PolicyModel
from openrlhf.models.ring import FLASH, _add
from openrlhf.models.self_check import resolve_row_layout
from openrlhf.models.sequence_parallel import Block, cut
from openrlhf.rows import PackedRow, Sample
from openrlhf.tasks.prepare import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_flash_attention_keeps_sequences_apart(tmp_path: Path) -> None:
    """A packed row in bf16 scores every sequence as a row of its own does."""
    task = prepare(tmp_path, num_pretrain=8, num_sft=8, num_prompts=8, num_eval=8)
    model = PolicyModel(
        load_causal_lm(str(task.model), flag="--model", dtype="bf16", attention="auto")
    ).cuda()
    random = torch.Generator().manual_seed(0)
    samples = []
    for length in (5, 130, 64, 2, 33):
        mask = torch.ones(length, dtype=torch.bool)
        mask[0] = False
        samples.append(Sample(token_ids=torch.randint(3, 300, (length,), generator=random), action_mask=mask))
    with torch.no_grad():
        packed = model(PackedRow.of(samples).to("cuda")).log_probs
        alone = torch.cat([model(PackedRow.of([s]).to("cuda")).log_probs for s in samples])
    torch.testing.assert_close(packed, alone, atol=2e-2, rtol=0)


HEADS = [
    pytest.param(4, 4, 64, 64, id="as many heads"),
    pytest.param(8, 2, 128, 128, id="grouped"),
    pytest.param(4, 1, 192, 128, id="values of another size"),
    pytest.param(4, 2, 36, 36, id="no multiple of 8"),
    pytest.param(4, 2, 256, 256, id="the largest of the kernel"),
    pytest.param(2, 1, 320, 320, id="larger than the kernel has"),
]
ROW = (5, 130, 1, 64, 2, 333)
OF_VALUES = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Error bound of a kernel, as a share of the largest value that it adds up. In half precision a kernel rounds
probabilities and results by 2^-9 (bf16) or 2^-12 (fp16); in float32 it adds up to 333 products, each rounded
by 2^-24."""


def exact_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, scaling: float) -> Tensor:
    """Computes the same as `packed_attention`, with every score of a row at once, in float64."""
    sequence = torch.repeat_interleave(torch.arange(len(ROW)), torch.tensor(ROW)).to(q.device)
    i = torch.arange(len(sequence), device=q.device)
    distance = i[:, None] - i
    seen = (sequence[:, None] == sequence) & (distance >= 0) & (distance < (window or len(i)))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * scaling).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), HEADS)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_against_float64(heads, kv_heads, size, value_size, window, dtype) -> None:
    """The output and all gradients agree with float64, whichever kernel computes them."""
    torch.manual_seed(0)
    shapes = (heads, size), (kv_heads, size), (kv_heads, value_size)
    qkv = [torch.randn(1, h, sum(ROW), d, device="cuda", dtype=dtype, requires_grad=True) for h, d in shapes]
    wide = [x.detach().double().requires_grad_() for x in qkv]
    packing = packing_kwargs(PACKED, ROW, torch.device("cuda"))["packing"]
    output, _ = packed_attention(nn.Module(), *qkv, None, sliding_window=window, packing=packing)
    expected = exact_attention(*wide, window, size**-0.5)
    assert (output.shape, output.dtype) == ((1, sum(ROW), heads, value_size), dtype)
    weights = torch.randn(expected.shape, device="cuda", dtype=dtype)
    output.backward(weights)
    expected.backward(weights.double())
    for found, exact in ((output, expected), *((x.grad, y.grad) for x, y in zip(qkv, wide, strict=True))):
        # A gradient is a sum over the group's heads of what was rounded after another sum.
        limit = 8 * OF_VALUES[dtype] * float(exact.abs().max())
        assert float((found.double() - exact).abs().max()) < limit


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_of_a_slice_against_float64(window, dtype) -> None:
    """Queries of a slice that begins and ends within a sequence, as in a row that ranks share by gathering
    keys, have the output and the gradients of float64."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    shapes = (8, 128), (2, 128), (2, 128)
    qkv = [torch.randn(1, h, sum(ROW), d, device=device, dtype=dtype, requires_grad=True) for h, d in shapes]
    wide = [x.detach().double().requires_grad_() for x in qkv]
    inside, until, seen = cut(ROW, 70, 300)
    output = _attend(
        qkv[0][:, :, 70:300],
        *(x[:, :, seen] for x in qkv[1:]),
        Packing.of(inside, device),
        Packing.of(until, device),
        Scoring(window=window),
    )
    expected = exact_attention(*wide, window, 128**-0.5)[:, 70:300]
    weights = torch.randn(expected.shape, device=device, dtype=dtype)
    output.backward(weights)
    expected.backward(weights.double())
    for found, exact in ((output, expected), *((x.grad, y.grad) for x, y in zip(qkv, wide, strict=True))):
        limit = 8 * OF_VALUES[dtype] * float(exact.abs().max())
        assert float((found.double() - exact).abs().max()) < limit


def test_parts_of_the_keys_put_together_against_float64() -> None:
    """Queries of the last 133 tokens of a sequence see the 200 tokens before them and then themselves, as
    keys travel round ranks: the output and the gradients are those of float64."""
    torch.manual_seed(0)
    device, dtype = torch.device("cuda"), torch.bfloat16
    q, grad = (torch.randn(1, 8, 133, 128, device=device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, 2, 333, 128, device=device, dtype=dtype) for _ in range(2))
    all_queries, own = Packing.of((133,), device), slice(None)
    blocks = (
        Block(own, slice(200), all_queries, Packing.of((200,), device), causal=False),
        Block(own, slice(200, None), all_queries, all_queries, causal=True),
    )
    output, lse = torch.zeros_like(q, dtype=torch.float32), torch.full((1, 8, 133), -torch.inf, device=device)
    for block in blocks:
        _add(output, lse, *FLASH.forward(q, k[:, :, block.of], v[:, :, block.of], block, 0.1))
    gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for block in blocks:
        k_part, v_part = k[:, :, block.of], v[:, :, block.of]
        found = FLASH.backward(grad, q, output.to(dtype), lse, k_part, v_part, block, 0.1)
        for total, x, place in zip(gradients, found, (own, block.of, block.of), strict=True):
            total[:, :, place] += x
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    seen = torch.ones(133, 333, device=device).tril(200).bool()
    expected = F.scaled_dot_product_attention(*wide, attn_mask=seen, scale=0.1, enable_gqa=True)
    expected.backward(grad.double())
    for found, exact in ((output, expected), *((x, y.grad) for x, y in zip(gradients, wide, strict=True))):
        assert float((found.double() - exact).abs().max()) < 8 * OF_VALUES[dtype] * float(exact.abs().max())


def test_capped_scores_and_sinks_against_float64() -> None:
    """Attention of Gemma 2 and gpt-oss, which no kernel supports, agrees with float64."""
    torch.manual_seed(0)
    qkv = [torch.randn(1, 4, 7, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    packing = packing_kwargs(PACKED, (7,), torch.device("cuda"))["packing"]
    sinks = torch.randn(4, device="cuda", dtype=torch.bfloat16)
    output, _ = packed_attention(nn.Module(), *qkv, None, softcap=2.0, s_aux=sinks, packing=packing)
    q, k, v = (x.double() for x in qkv)
    scores = 2 * torch.tanh(q @ k.transpose(2, 3) / 8 / 2)
    scores = scores.masked_fill(~torch.ones(7, 7, device="cuda").tril().bool(), float("-inf"))
    scores = torch.cat([scores, sinks.double().view(1, 4, 1, 1).expand(1, 4, 7, 1)], dim=-1)
    expected = (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2)
    torch.testing.assert_close(output.double(), expected, atol=8 * 2**-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("summed", [False, True])
def test_head_against_float64(dtype, softcap, summed) -> None:
    """Log-probs, entropy and gradients of a head in chunks agree with float64; the results are float32 also
    if the weight is not."""
    torch.manual_seed(0)
    num_actions, size, vocabulary = 300, 64, 1000
    hidden = torch.randn(num_actions, size, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, size, device="cuda") / 8).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (num_actions,), device="cuda")
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = wide[0] @ wide[1].T
    exact = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).log_softmax(-1)
    log_probs, entropy = exact.gather(-1, targets[:, None])[:, 0], -(exact.exp() * exact).sum(-1)
    if summed:
        found = (sum_of_log_probs(hidden, weight, targets, softcap=softcap, chunk=64),)
        expected = (log_probs.sum(),)
    else:
        found = linear_log_probs(hidden, weight, targets, softcap=softcap, with_entropy=True, chunk=64)
        expected = log_probs, entropy
    # A logit is a sum of 64 products below 4 * 4 / 8, of which a float32 errs by 2^-24 each.
    limit = 64 * 2 * 2**-24 * (num_actions if summed else 1) + 1e-5
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=limit, rtol=1e-5)
    sum(x.mean() for x in found).backward()
    sum(y.mean() for y in expected).backward()
    for x, y in zip((hidden, weight), wide, strict=True):
        # factors and results are rounded to the dtype
        limit = 4 * torch.finfo(dtype).eps * float(y.grad.abs().max())
        assert float((x.grad.double() - y.grad).abs().max()) < max(limit, 1e-6)


def test_memory_and_time_of_a_large_head(record_property: Callable[[str, float], None]) -> None:
    """A head with 151,936 tokens reads 4,096 rows of 2,048 numbers. Nothing of the size of all logits (2.3
    GiB) is ever allocated: only a chunk, its rounded copy, and the gradient of the head in float32 and in its
    own dtype."""
    A, H, V = 4096, 2048, 151_936
    hidden = torch.randn(A, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(V, H, device="cuda") / 64).bfloat16().requires_grad_()
    targets = torch.randint(0, V, (A,), device="cuda")
    chunk = rows_of_chunk(weight) * V * 4
    arguments = hidden, weight, targets
    ways = {
        "head": lambda: linear_log_probs(*arguments)[0].sum(),
        "summed head": lambda: sum_of_log_probs(*arguments),
    }
    for name, compute in ways.items():
        compute().backward()
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        compute().backward()
        end.record()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        record_property(f"{name} of 152k, ms", start.elapsed_time(end))
        record_property(f"{name} of 152k, GiB", peak / 2**30)
        assert peak < 1.6 * chunk + V * H * (4 + 2) + 3 * A * H * 4
        hidden.grad = weight.grad = None


@pytest.mark.skipif(not find_spec("liger_kernel"), reason="needs liger-kernel")
def test_liger_kernels_only_round_otherwise(tmp_path: Path) -> None:
    task = prepare(tmp_path, num_pretrain=8, num_sft=8, num_prompts=8, num_eval=8)
    found = []
    for liger in (False, True):
        options = {"flag": "--model", "dtype": "fp32", "attention": "auto", "liger": liger}
        model = PolicyModel(load_causal_lm(str(task.model), **options)).cuda()
        resolve_row_layout(model, model)  # refuses kernels that compute something else
        mask = torch.arange(64) > 0
        row = PackedRow.of([Sample(token_ids=torch.arange(3, 67), action_mask=mask)]).to("cuda")
        log_probs = model(row).log_probs
        log_probs.sum().backward()
        found.append((log_probs, next(model.parameters()).grad))
    for own, of_liger in zip(*found, strict=True):
        torch.testing.assert_close(of_liger, own, atol=1e-3, rtol=1e-3)
