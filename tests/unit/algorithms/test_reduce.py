import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.reductions import (
    BLOCK,
    blockwise,
    constant_length_mean,
    mean,
    prompt_mean,
    sample_mean,
    segment_mean,
    segment_sum,
    spread,
    token_mean,
    whiten,
)
from openrlhf.rows import LossNorm

LOSS = torch.tensor([1.0, 3.0, 10.0, 2.0, 4.0, 6.0])
COUNTS = torch.tensor([2, 1, 0, 3])
NORM = LossNorm(num_tokens=6, num_sequences=3)


def test_segments():
    # 1 + 3, 10, nothing, 2 + 4 + 6
    assert segment_sum(LOSS, COUNTS).tolist() == [4, 10, 0, 12]
    assert segment_mean(LOSS, COUNTS).tolist() == [2, 10, 0, 4]
    assert spread(torch.tensor([7, 8, 9, 5]), COUNTS, 6).tolist() == [7, 7, 8, 5, 5, 5]


def test_the_mean_of_prompts_by_hand():
    """The first two sequences belong to one prompt, the last to another: (1 + 3 + 10) / 3 and 12 / 3."""
    prompts = torch.tensor([0, 0, 0, 2, 2, 2])
    norm = LossNorm(6, 3, prompts.bincount())
    assert prompt_mean(LOSS, prompts, norm).item() == pytest.approx((14 / 3 + 12 / 3) / 2)
    parts = [prompt_mean(LOSS[part], prompts[part], norm) for part in (slice(2), slice(2, 5), slice(5, 6))]
    assert sum(parts).item() == pytest.approx((14 / 3 + 12 / 3) / 2)


def test_means_by_hand():
    # (1 + 3 + 10 + 2 + 4 + 6) / 6
    assert token_mean(LOSS, NORM).item() == pytest.approx(26 / 6)
    # (2 + 10 + 4) / 3: the sequence without actions is in neither numerator nor denominator
    assert sample_mean(LOSS, COUNTS, NORM).item() == pytest.approx(16 / 3)
    # 26 / (3 sequences * 20 tokens)
    assert constant_length_mean(LOSS, NORM, 20).item() == pytest.approx(26 / 60)


def test_norm_of_the_step_not_of_the_row():
    """A row holding a quarter of the step's tokens contributes a quarter of the mean."""
    assert token_mean(torch.ones(5), LossNorm(20, 4)).item() == pytest.approx(0.25)
    assert sample_mean(torch.ones(5), torch.tensor([5]), LossNorm(20, 4)).item() == pytest.approx(0.25)


@settings(deadline=None, max_examples=50)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any),
    cut=st.integers(0, 8),
    seed=st.integers(0, 1000),
)
def test_shares_add_up_however_the_step_is_split(counts, cut, seed):
    loss = torch.randn(sum(counts), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    norm = LossNorm(sum(counts), sum(c > 0 for c in counts))
    head, tail = torch.tensor(counts[:cut]), torch.tensor(counts[cut:])
    parts = [(loss[: head.sum().long()], head.long()), (loss[head.sum().long() :], tail.long())]
    sequence_means = [part.mean() for part in loss.split(counts) if len(part)]
    assert sum(token_mean(x, norm) for x, _ in parts).item() == pytest.approx(loss.mean().item())
    shares = sum(sample_mean(x, c, norm) for x, c in parts)
    assert shares.item() == pytest.approx(torch.stack(sequence_means).mean().item())


def test_a_row_without_actions_has_loss_zero_and_a_gradient():
    loss = torch.zeros(0, requires_grad=True)
    for share in (
        token_mean(loss, LossNorm(0, 0)),
        sample_mean(loss, torch.tensor([0]), LossNorm(0, 0)),
        constant_length_mean(loss, LossNorm(0, 0), 10),
    ):
        assert share.item() == 0
        share.backward()  # collectives in the backward pass need every rank
    assert mean(torch.zeros(0)).item() == 0
    assert whiten(torch.zeros(0)).tolist() == []


def test_sequences_are_found_without_a_copy_to_the_cpu():
    """Tensors of the device `meta` have no values that could be read, so nothing waits for a GPU."""
    x, counts = LOSS.to("meta"), COUNTS.to("meta")
    assert segment_sum(x, counts).shape == segment_mean(x, counts).shape == (4,)
    assert spread(segment_sum(x, counts), counts, 6).shape == (6,)


def test_whiten():
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    # mean 3, deviations -2 -1 0 3, variance (4 + 1 + 0 + 9) / 4 = 3.5
    assert whiten(x).tolist() == pytest.approx([d / math.sqrt(3.5) for d in (-2, -1, 0, 3)])
    assert whiten(x, scale=False).tolist() == [-2, -1, 0, 3]
    assert whiten(torch.full((4,), 5.0)).tolist() == [0, 0, 0, 0]
    assert not whiten(torch.full((4096,), 1.1)).any()  # their float32 mean is another number
    by_rounding = torch.tensor([1.0, 1 + 2**-23])
    assert whiten(by_rounding).abs().max() < 0.01


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_block_by_block_an_expression_has_the_bits_that_it_has_as_a_whole(size: int) -> None:
    torch.manual_seed(size)
    x, y = torch.randn(2, size)
    kl = lambda a, b: (b - a).exp() - 1 - (b - a)
    assert torch.equal(blockwise(kl, x, y), kl(x, y))
    weights = blockwise(lambda a: a.double().exp(), x)
    assert weights.dtype == torch.double and torch.equal(weights, x.double().exp())
