"""Attention whose keys travel from rank to rank equals the attention of the whole row. The ranks are
threads."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.models import attention, ring
from openrlhf.models.attention import packed_attention, packing_kwargs
from openrlhf.models.sequence_parallel import Block, RowShard, SequenceParallel
from openrlhf.types import not_none

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 6, 2, 16
ROWS = {
    "one sequence": (64,),
    "cut by every edge": (5, 59),
    "short ones": (10, 1, 26, 1, 1, 14, 11),
    "of one token": (1,) * 64,
    "edges where chunks end": (8, 16, 40),
}


def sharing() -> SequenceParallel:
    group = dist.group.WORLD
    assert group is not None
    return SequenceParallel(group=group, mode="ring")


def share_of(rank: int, num_ranks: int, lengths: tuple[int, ...], monkeypatch) -> RowShard:
    """Returns the share of any rank, without process groups."""
    monkeypatch.setattr(SequenceParallel, "size", num_ranks)
    monkeypatch.setattr(SequenceParallel, "rank", rank)
    nobody: dist.ProcessGroup = None  # pyrefly: ignore[bad-assignment]  what is asked of it is above
    return RowShard.of(SequenceParallel(group=nobody, mode="ring"), lengths, CPU)


@pytest.mark.parametrize(
    ("rank", "other", "expected"),
    [
        (0, 0, [(0, 4, 0, 4, (4,), True), (4, 8, 4, 8, (1, 2, 1), True)]),
        (0, 1, [(4, 5, 2, 4, (1,), False), (4, 5, 4, 8, (1,), False)]),
        (1, 1, [(0, 4, 0, 4, (1, 1, 2), True), (4, 8, 2, 4, (4,), False), (4, 8, 4, 8, (4,), True)]),
        (1, 0, [(0, 1, 0, 4, (1,), False)]),
    ],
)
def test_what_a_rank_sees_of_the_keys_of_another(monkeypatch, rank: int, other: int, expected: list) -> None:
    """Chunks have 4 tokens; the first of two ranks has the first and the last chunk. Sequences are at 0-5,
    5-6, 6-13, 13-15 and 15-16."""
    blocks = share_of(rank, 2, (5, 1, 7, 2, 1), monkeypatch).blocks(other)
    found = [(b.own.start, b.own.stop, b.of.start, b.of.stop, b.queries.lengths, b.causal) for b in blocks]
    assert found == expected


@pytest.mark.parametrize("num_ranks", [2, 4, 7])
def test_a_single_sequence_is_the_same_work_for_all_ranks(monkeypatch, num_ranks: int) -> None:
    """The work is counted in pairs of a query and a key, of chunks of 10 tokens: that many of N (N + 1) / 2
    in all."""

    def pairs(block: Block) -> int:
        (n,), (m,) = block.queries.lengths, block.keys.lengths
        return n * (n + 1) // 2 if block.causal else n * m

    tokens, found = 20 * num_ranks, []
    for rank in range(num_ranks):
        shard = share_of(rank, num_ranks, (tokens,), monkeypatch)
        found.append([sum(map(pairs, shard.blocks(other))) for other in range(num_ranks)])
    assert {sum(of_rank) for of_rank in found} == {tokens * (tokens + 1) // 2 // num_ranks}
    assert {of_rank[i] for rank, of_rank in enumerate(found) for i in range(num_ranks) if i != rank} == {200}


def attended(
    lengths: tuple[int, ...], dtype: torch.dtype, shard: SequenceParallel | None = None
) -> list[Tensor]:
    """Returns the output and the gradients of queries, keys and values, of a whole row or of a slice of
    it."""
    random = torch.Generator().manual_seed(0)
    shapes = (HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, SIZE - 5)
    whole = [torch.randn(sum(lengths), *shape, generator=random) for shape in shapes]
    weights = torch.randn(sum(lengths), HEADS, SIZE - 5, generator=random)
    own = (lambda x: x) if shard is None else shard.own
    qkv = [own(x).transpose(0, 1)[None].to(dtype).requires_grad_() for x in whole]
    packing = packing_kwargs(attention.PACKED, lengths, CPU, shard)["packing"]
    output, _ = packed_attention(nn.Module(), *qkv, None, scaling=0.3, packing=packing)
    output.backward(own(weights)[None].to(dtype))
    return [output.transpose(1, 2).detach(), *(not_none(x.grad) for x in qkv)]


LIMITS = {torch.float64: 64 * 2**-53, torch.float32: 64 * 2**-24, torch.bfloat16: 8 * 2**-7}
"""Error bound as a share of the largest value: sums of up to 64 products, each rounded; bf16 sums are added
up in float32, and inputs, outputs and their gradients are rounded."""


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_ring_attention_is_the_attention_of_the_whole_row(threads, num_ranks, lengths, dtype):
    """The output and gradients of grouped heads, with values of another size, equal those of float64 numbers
    in one piece."""
    expected = attended(lengths, torch.float64)

    def differences() -> list[float]:
        found = attended(lengths, dtype, sharing())
        own = [sharing().own(x[0].transpose(0, 1)).transpose(0, 1)[None] for x in expected]
        return [float((x.double() - y).abs().max()) for x, y in zip(found, own, strict=True)]

    for found in threads(num_ranks, differences):
        for difference, whole in zip(found, expected, strict=True):
            assert difference <= LIMITS[dtype] * max(1, float(whole.abs().max()))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"sliding_window": 8}, "a sliding window"),
        ({"softcap": 2.0}, "capped scores"),
        ({"s_aux": torch.zeros(HEADS)}, "attention sinks"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_a_layer_that_cannot_use_the_ring_is_logged_once(threads, caplog, options, reason):
    attention.warn_once.cache_clear()

    def attend() -> None:
        qkv = (torch.zeros(1, heads, 4, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        packing = packing_kwargs(attention.PACKED, (8,), CPU, sharing())["packing"]
        for x in [[*qkv]] * 2:
            packed_attention(nn.Module(), *x, None, packing=packing, **options)

    threads(2, attend)
    assert len(caplog.messages) == bool(reason)
    assert all(reason in message and "allgather" in message for message in caplog.messages)


def test_keys_arrive_at_every_rank_in_turn(threads: Callable) -> None:
    def visited() -> list[tuple[int, float]]:
        own = torch.full((2, 3), float(dist.get_rank()))
        return [(rank, float(x.mean())) for rank, x in ring._around_ring(own, sharing())]

    assert threads(3, visited) == [
        [(r, float(r)) for r in order] for order in ([0, 2, 1], [1, 0, 2], [2, 1, 0])
    ]


# ---- FlashAttention, replaced by its formulas


def scores_of(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Returns the scores (heads, n, m) of one sequence from (n, heads, d) and (m, kv heads, d)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    seen = torch.ones(scores.shape[1:]).tril().bool() if causal else torch.ones(scores.shape[1:]).bool()
    return scores.masked_fill(~seen, float("-inf"))


def each(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Iterator[tuple[slice, slice]]:
    places = [[slice(*pair) for pair in pairwise(cumulative.tolist())] for cumulative in (cu_q, cu_k)]
    assert [max_q, max_k] == [max(x.stop - x.start for x in of) for of in places]
    assert cu_q.dtype == cu_k.dtype == torch.int32
    return zip(*places, strict=True)


def flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):
    assert (options["window_size_left"], options["window_size_right"]) == ((-1, 0) if causal else (-1, -1))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for i, j in each(cu_q, cu_k, max_q, max_k):
        scores = scores_of(q[i], k[j], causal, options["scale"])
        values = v[j].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[i], lse[:, i] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values), scores.logsumexp(-1)
    nothing = q.new_empty(0)
    return out, lse, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def flash_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, **options
):
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    per_kv = q.shape[1] // k.shape[1]
    for i, j in each(cu_q, cu_k, max_q, max_k):
        weights = (scores_of(q[i], k[j], causal, options["scale"]) - lse[:, i, None]).exp()
        keys, values = (x[j].repeat_interleave(per_kv, dim=1) for x in (k, v))
        slope = torch.einsum("ihd,jhd->hij", grad[i], values) - (grad[i] * out[i]).sum(-1).T[:, :, None]
        slope = weights * slope * options["scale"]
        dq[i] = torch.einsum("hij,jhd->ihd", slope, keys)
        dk[j] = torch.einsum("hij,ihd->jhd", slope, q[i]).unflatten(1, (-1, per_kv)).sum(2)
        dv[j] = torch.einsum("hij,ihd->jhd", weights, grad[i]).unflatten(1, (-1, per_kv)).sum(2)
    return dq, dk, dv


@pytest.fixture
def flash() -> Iterator[None]:
    """Replaces torch's varlen attention on the CPU."""
    operators = torch.library.Library("aten", "IMPL")
    operators.impl("_flash_attention_forward", flash_forward, "CPU")
    operators.impl("_flash_attention_backward", flash_backward, "CPU")
    yield
    operators._destroy()


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_with_the_kernel_of_gpus(threads, monkeypatch, lengths):
    """One call for each block equals one call for each sequence."""
    on_cpu = threads(2, lambda: attended(lengths, torch.float64, sharing()))
    monkeypatch.setattr(ring, "ON_CPU", ring.FLASH)
    with_flash = threads(2, lambda: attended(lengths, torch.float64, sharing()))
    torch.testing.assert_close(with_flash, on_cpu, atol=1e-12, rtol=0)
