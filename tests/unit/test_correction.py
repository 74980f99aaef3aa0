import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algos.correction import CORRECTIONS, mismatch_metrics
from openrlhf.algos.policy_loss import token_log_ratio

COUNTS = torch.tensor([2, 3])
RATIO = torch.tensor([0.25, 1.0, 4.0, 8.0, 2.0])  # geometric means 0.5 and 4


def test_tis_clamps():
    assert CORRECTIONS["tis"](RATIO.log(), COUNTS, 0.5, 5.0).tolist() == pytest.approx([0.5, 1, 4, 5, 2])


def test_icepop_drops_tokens():
    assert CORRECTIONS["icepop"](RATIO.log(), COUNTS, 0.5, 5.0).tolist() == pytest.approx([0, 1, 4, 0, 2])


def test_seq_mask_tis_drops_sequences_and_clamps_the_rest():
    correct = CORRECTIONS["seq-mask-tis"]
    assert correct(RATIO.log(), COUNTS, 0.6, 5.0).tolist() == pytest.approx([0, 0, 4, 5, 2])
    assert correct(RATIO.log(), COUNTS, 0.4, 3.0).tolist() == pytest.approx([0.4, 1, 0, 0, 0])


def test_sequences_have_bounds_of_their_own():
    """Ratios 1.2, 1.2 and 0.9, 1.1: geometric means 1.2 and 0.995."""
    ratio, counts = torch.tensor([1.2, 1.2, 0.9, 1.1]), torch.tensor([2, 2])
    correct = CORRECTIONS["seq-mask-tis"]
    assert correct(ratio.log(), counts, 0.95, 1.05, (0.99, 1.01)).tolist() == pytest.approx(
        [0, 0, 0.95, 1.05]
    )
    assert correct(ratio.log(), counts, 0.95, 1.3).tolist() == pytest.approx([1.2, 1.2, 0.95, 1.1])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_are_finite_however_far_the_sampler_is(name):
    log_probs, rollout = torch.tensor([0.0, -900, 0, -1, -1]), torch.tensor([-900.0, 0, -torch.inf, -1, -1])
    weights = CORRECTIONS[name](token_log_ratio(log_probs, rollout, COUNTS), COUNTS, 0.5, 5.0)
    assert weights.isfinite().all()
    assert weights.max() <= 5


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_faithful_sampler_changes_nothing(name):
    assert CORRECTIONS[name](torch.zeros(5), COUNTS, 0.5, 5.0).tolist() == [1] * 5
    assert CORRECTIONS[name](torch.zeros(0), torch.tensor([0]), 0.5, 5.0).tolist() == []


def test_mismatch_metrics():
    metrics = mismatch_metrics(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -3.0]))
    # r = 1 and e: (0 + e - 1 - 1) / 2
    assert metrics["mismatch/kl"] == pytest.approx((math.e - 2) / 2)
    assert metrics["mismatch/abs_diff_mean"] == pytest.approx(0.5)
    assert metrics["mismatch/abs_diff_p99"] == metrics["mismatch/abs_diff_max"] == 1
    # (1 + e)^2 / (2 (1 + e^2))
    assert metrics["mismatch/ess"] == pytest.approx((1 + math.e) ** 2 / (2 * (1 + math.e**2)))


def test_a_sampler_that_is_the_policy_has_no_mismatch():
    for n in (0, 5):
        metrics = mismatch_metrics(torch.full((n,), -2.0), torch.full((n,), -2.0))
        assert metrics.pop("mismatch/ess") == 1
        assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize("n", [1, 7, 99, 100, 101, 1000])
def test_at_most_one_percent_of_the_actions_differ_by_more_than_p99(n):
    differences = torch.randperm(n) / n
    metrics = mismatch_metrics(-differences, torch.zeros(n))
    p99 = metrics["mismatch/abs_diff_p99"]
    assert (differences > p99).sum() <= n / 100 < (differences >= p99).sum()


def test_the_effective_sample_size_counts_who_carries_the_weight():
    """Of 4 actions one weighs e^20 and the others next to nothing: the share is a quarter."""
    ess = mismatch_metrics(torch.tensor([0.0, -20, -20, -20]), torch.tensor([-20.0, 0, 0, 0]))["mismatch/ess"]
    assert ess == pytest.approx(0.25)


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20))
def test_the_effective_sample_size_is_a_share_whatever_the_weights(log_ratio):
    ess = mismatch_metrics(torch.tensor(log_ratio), torch.zeros(len(log_ratio)))["mismatch/ess"]
    assert 1 / len(log_ratio) - 1e-9 <= ess <= 1 + 1e-9
