import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.algorithms.preference.dpo import dpo_loss
from openrlhf.algorithms.preference.ipo import ipo_loss
from openrlhf.algorithms.preference.kto import kto_loss
from openrlhf.algorithms.preference.reward_model import pairwise_loss

finite = st.floats(-50, 50)
FAR = [-1e4, -50.0, 0.0, 50.0, 1e4]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_pairwise_by_hand():
    chosen, rejected = doubles(2.0, -1.0, 0.5), doubles(1.0, 1.0, 0.5)
    # sigmoid(1) = 0.731, sigmoid(-2) = 0.119, sigmoid(0) = 0.5
    expected = [0.31326168751822286, 2.1269280110429727, math.log(2)]
    assert pairwise_loss(chosen, rejected).tolist() == pytest.approx(expected, rel=1e-12)
    # with margins the differences are 1 - 0.5, -2 - 1, 0 + 2
    with_margin = pairwise_loss(chosen, rejected, doubles(0.5, 1.0, -2.0))
    expected = [0.47407698418010663, 3.0485873515737424, 0.12692801104297263]
    assert with_margin.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_slope_of_the_pairwise_loss_is_how_wrong_it_is():
    chosen, rejected = doubles(2.0).requires_grad_(), doubles(1.0).requires_grad_()
    pairwise_loss(chosen, rejected, 0.5).backward()
    wrong = 1 / (1 + math.exp(0.5))  # 1 - sigmoid(2 - 1 - 0.5)
    assert chosen.grad.item() == pytest.approx(-wrong)
    assert rejected.grad.item() == pytest.approx(wrong)


def test_dpo_by_hand():
    h = doubles(2.0, -3.0)
    # beta h = 0.2, -0.3
    assert dpo_loss(h, beta=0.1).tolist() == pytest.approx([0.5981388693815918, 0.8543552444685272])
    # 0.75 * 0.5981 + 0.25 * (0.5981 + 0.2), 0.75 * 0.8544 + 0.25 * (0.8544 - 0.3)
    smoothed = dpo_loss(h, beta=0.1, label_smoothing=0.25)
    assert smoothed.tolist() == pytest.approx([0.5981388693815918 + 0.05, 0.8543552444685272 - 0.075])


def test_ipo_by_hand():
    # targets 1 / 0.2 = 5 and 1 / 2
    assert ipo_loss(doubles(2.0, 5.0, -1.0), beta=0.1).tolist() == pytest.approx([9.0, 0.0, 36.0])
    assert ipo_loss(doubles(2.0), beta=1.0).tolist() == pytest.approx([2.25])


def test_kto_by_hand():
    log_ratio = doubles(3.0, 3.0, -1.0, -1.0)
    desirable = torch.tensor([True, False, True, False])
    losses = kto_loss(
        log_ratio, desirable, 1.0, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0
    ).tolist()
    # beta (log_ratio - kl) = 1 and -1; sigmoid(1) = 0.73106, sigmoid(-1) = 0.26894
    high, low = 0.7310585786300049, 0.2689414213699951
    assert losses == pytest.approx([2 * (1 - high), 3 * (1 - low), 2 * (1 - low), 3 * (1 - high)])


@pytest.mark.parametrize("gap", FAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_scores_stay_finite(gap, dtype):
    def losses(x):
        zero, desirable = torch.zeros_like(x), torch.tensor([True])
        yield pairwise_loss(x, zero)
        yield pairwise_loss(zero, x, 3.0)
        yield dpo_loss(x, beta=1.0, label_smoothing=0.1)
        yield ipo_loss(x, beta=0.1)
        yield kto_loss(x, desirable, 0.0, beta=1.0)
        yield kto_loss(x, ~desirable, 0.0, beta=1.0)

    x = torch.tensor([gap], dtype=dtype, requires_grad=True)
    for loss in losses(x):
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


def test_far_scores_by_hand():
    assert pairwise_loss(torch.tensor([1e4]), torch.tensor([0.0])).item() == 0
    assert pairwise_loss(torch.tensor([0.0]), torch.tensor([1e4])).item() == 1e4
    assert dpo_loss(torch.tensor([-1e4]), beta=0.5).item() == 5e3


@given(h=finite, beta=st.floats(0.01, 2), smoothing=st.floats(0, 0.5))
def test_flipped_labels_are_smoothed_the_other_way(h, beta, smoothing):
    """A pair whose answers are swapped is a pair with label smoothing 1 - e."""
    swapped = dpo_loss(doubles(-h), beta=beta, label_smoothing=1 - smoothing)
    straight = dpo_loss(doubles(h), beta=beta, label_smoothing=smoothing)
    assert straight.item() == pytest.approx(swapped.item(), rel=1e-12, abs=1e-12)


@given(h=finite, beta=st.floats(0.01, 2))
def test_with_even_labels_both_answers_are_worth_the_same(h, beta):
    losses = [dpo_loss(doubles(x), beta=beta, label_smoothing=0.5).item() for x in (h, -h, 0.0)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0] >= losses[2] - 1e-12


@given(smoothing=st.floats(0.01, 0.49), beta=st.floats(0.05, 2))
def test_a_smoothed_pair_has_enough_at_the_log_odds(smoothing, beta):
    """The minimum lies where sigmoid(beta h) = 1 - e: more confidence than the labels deserve costs."""
    best = doubles(math.log((1 - smoothing) / smoothing) / beta).requires_grad_()
    dpo_loss(best, beta=beta, label_smoothing=smoothing).backward()
    assert best.grad.item() == pytest.approx(0, abs=1e-12)


@given(a=finite, b=finite, beta=st.floats(0.01, 1), kl=st.floats(0, 10))
def test_kto_rewards_likely_good_and_unlikely_bad_answers(a, b, beta, kl):
    low, high = sorted((a, b))
    log_ratio = doubles(low, high)
    good = kto_loss(log_ratio, torch.tensor([True, True]), kl, beta=beta)
    bad = kto_loss(log_ratio, torch.tensor([False, False]), kl, beta=beta)
    assert good[0] >= good[1]
    assert bad[0] <= bad[1]
    assert (good + bad).tolist() == pytest.approx([1, 1])
    assert good.min() >= 0
    assert good.max() <= 1


def test_kto_gradients():
    """d / d log_ratio is -w_D beta s (1 - s) of a good answer and w_U beta s (1 - s) of a bad one."""
    log_ratio = doubles(0.7, 0.7).requires_grad_()
    desirable = torch.tensor([True, False])
    losses = kto_loss(log_ratio, desirable, 0.2, beta=0.4, desirable_weight=1.5, undesirable_weight=0.5)
    losses.sum().backward()
    s = math.exp(log_sigmoid(0.4 * 0.5))
    slope = 0.4 * s * (1 - s)
    assert log_ratio.grad.tolist() == pytest.approx([-1.5 * slope, 0.5 * slope])
