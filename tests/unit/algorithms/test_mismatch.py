"""Mismatch between sampler and trainer."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.mismatch import mismatch_metrics

NOW, SAMPLER = torch.full((5,), -1.0), torch.tensor([-1.0, -1, -2, -3, -3])


def test_the_mismatch_of_each_staleness():
    """Fresh actions agree; those one update old are off by 1, those three and five by 2."""
    staleness = torch.tensor([0, 0, 1, 3, 5], dtype=torch.int32)
    metrics = mismatch_metrics(NOW, SAMPLER, staleness)
    of = {
        name: {age: metrics[f"mismatch/{name}_staleness_{age}"] for age in ("0", "1", "3_or_more")}
        for name in ("kl", "abs_diff_mean", "ess")
    }
    assert of["kl"] == pytest.approx({"0": 0, "1": math.e - 2, "3_or_more": math.e**2 - 3})
    assert of["abs_diff_mean"] == {"0": 0, "1": 1, "3_or_more": 2}
    # all actions of one age have the same weight
    assert of["ess"] == pytest.approx({"0": 1, "1": 1, "3_or_more": 1})
    assert metrics["mismatch/fresh_abs_diff_max"] == 0 and len(metrics) == 5 + 9 + 3
    of_all = mismatch_metrics(NOW, SAMPLER)
    assert {name: metrics[name] for name in of_all} == of_all


def test_two_ages_are_told_apart():
    metrics = mismatch_metrics(NOW, SAMPLER, torch.tensor([0, 0, 1, 1, 1]))
    assert metrics["mismatch/abs_diff_mean_staleness_0"] == 0
    assert metrics["mismatch/abs_diff_mean_staleness_1"] == pytest.approx(5 / 3)


def test_log_ratios_are_clamped_in_both_directions():
    metrics = mismatch_metrics(torch.tensor([-1.0, -500.0]), torch.tensor([-500.0, -1.0]))
    assert metrics["mismatch/abs_diff_mean"] == metrics["mismatch/abs_diff_max"] == 20
    assert metrics["mismatch/kl"] == pytest.approx((math.exp(20) - 21 + math.exp(-20) + 19) / 2)


def test_where_all_are_equally_stale_the_mismatch_is_told_once():
    for staleness in (None, torch.full((5,), 2), torch.tensor([3, 4, 5, 6, 7])):
        assert len(mismatch_metrics(NOW, SAMPLER, staleness)) == 5


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
    """One of 4 actions weighs e^20 and the others next to nothing: the share is a quarter."""
    ess = mismatch_metrics(torch.tensor([0.0, -20, -20, -20]), torch.tensor([-20.0, 0, 0, 0]))["mismatch/ess"]
    assert ess == pytest.approx(0.25)


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20))
def test_the_effective_sample_size_is_a_share_whatever_the_weights(log_ratio):
    ess = mismatch_metrics(torch.tensor(log_ratio), torch.zeros(len(log_ratio)))["mismatch/ess"]
    assert 1 / len(log_ratio) - 1e-9 <= ess <= 1 + 1e-9
