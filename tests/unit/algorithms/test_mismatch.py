"""Mismatch between sampler and trainer, and the limits at which a run warns or stops."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from openrlhf.algorithms.mismatch import MismatchWatch, check_mismatch, fresh_mismatch, mismatch_metrics
from openrlhf.errors import ErrorCode

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


def test_a_sequence_is_fresh_where_all_of_it_is():
    """The first and the last of three sequences were sampled by the current weights, up to 0.5 from them."""
    staleness = torch.tensor([0, 0, 0, 1, 0], dtype=torch.int32)
    sampler = NOW - torch.tensor([0.0, 0.1, 3, 3, 0.5])
    metrics = mismatch_metrics(NOW, sampler, staleness, torch.tensor([2, 2, 1]))
    assert fresh_mismatch(metrics | {"rollout/staleness_max": 1.0}) == pytest.approx(
        {
            "mismatch/fresh_abs_diff_mean": 0.2,
            "mismatch/fresh_abs_diff_p99": 0.5,
            "mismatch/fresh_abs_diff_max": 0.5,
        }
    )


def test_what_is_known_of_fresh_samples():
    """If all samples are fresh their mismatch is that of the whole step; if none is, there is no figure."""
    metrics = mismatch_metrics(NOW, SAMPLER)
    all_fresh = fresh_mismatch(metrics | {"rollout/staleness_max": 0.0})
    assert all_fresh == {name: metrics[name] for name in metrics if "abs_diff" in name}
    old = mismatch_metrics(NOW, SAMPLER, torch.ones(5, dtype=torch.int32), torch.tensor([5]))
    assert fresh_mismatch(old | {"rollout/staleness_max": 1.0}) == {}
    assert fresh_mismatch({"rollout/staleness_max": 0.0}) == {}


def gap(mean: float, p99: float = 0.0, largest: float = 0.0) -> dict[str, float]:
    names = ("mean", "p99", "max")
    values = {
        f"mismatch/abs_diff_{name}": value for name, value in zip(names, (mean, p99, largest), strict=True)
    }
    return values | {"rollout/staleness_max": 0.0}


@pytest.mark.parametrize(
    ("dtype", "fits", "exceeds"),
    [
        ("bf16", gap(0.3, 3.0, 19.0), gap(0.301)),
        ("bf16", gap(0.0), gap(0.0, 3.01)),
        ("fp32", gap(0.04, 0.4, 19.0), gap(0.041)),
        ("fp16", gap(0.04), gap(math.nan)),
    ],
)
def test_a_gap_that_rounding_cannot_explain_stops_the_run(dtype, fits, exceeds):
    check_mismatch(fits, dtype, None, 3)
    with refused(ErrorCode.WRONG_WEIGHTS) as error:
        check_mismatch(exceeds, dtype, None, 3)
    assert re.search(rf"^step 3: mismatch/abs_diff_\w+ is .* {dtype} ", error.value.text)
    # no sample is of the current weights
    check_mismatch(exceeds | {"rollout/staleness_max": 1.0}, dtype, None, 3)


def test_the_limit_of_a_user():
    check_mismatch(gap(0.9), "fp32", 1.0, 1)
    check_mismatch(gap(19.0, 20.0), "fp32", math.inf, 1)
    with refused(ErrorCode.WRONG_WEIGHTS, told="at most 0.001:"):
        check_mismatch(gap(0.002), "bf16", 0.001, 1)


def test_a_growing_gap_is_reported_at_once_and_only_once():
    """Three steps in float32 have a mean of 1e-6: five times that is noise, a hundred times is reported,
    before any limit that is right for all machines."""
    watch = MismatchWatch(dtype="fp32")
    steps = [watch.check(gap(mean)) for mean in (1e-6, 1e-6, 1e-6, 6e-6, 1.1e-4, 1.2e-4, 1e-6, 1e-4)]
    assert [bool(messages) for messages in steps] == [False, False, False, False, True, False, False, True]
    assert steps[4][0].startswith(
        "mismatch/abs_diff_mean > 1e-05 (now 0.00011; at most 1e-06 in the first steps): "
    )
    assert "--algo.router_replay" in steps[4][0]


def test_each_statistic_has_a_limit_of_its_own():
    watch = MismatchWatch(dtype="bf16")
    for _ in range(3):
        assert not watch.check(gap(0.004, 0.03, 0.2) | {"mismatch/probe_mean": 0.003})
    assert not watch.check(gap(0.019, 0.14, 0.99) | {"mismatch/probe_mean": 0.0149})
    for above in (gap(0.021), gap(0.0, 0.16), gap(0.0, 0.0, 1.01), gap(0.0) | {"mismatch/probe_mean": 0.016}):
        (message,) = watch.check(above)
        assert "> " in message
        assert not watch.check(gap(0.0) | {"mismatch/probe_mean": 0.0})


def test_the_first_steps_have_the_limit_of_their_precision():
    for dtype, limit in (("fp32", 0.005), ("fp16", 0.01), ("bf16", 0.05)):
        assert not MismatchWatch(dtype=dtype).check(gap(0.99 * limit, 9.9 * limit))
        assert MismatchWatch(dtype=dtype).check(gap(1.01 * limit))
        assert not MismatchWatch(dtype=dtype).check(gap(limit))
    noisy = MismatchWatch(dtype="bf16")
    for _ in range(4):
        noisy.check(gap(0.04))
    assert noisy.check(gap(0.051))  # it is not reported only at five times 0.04


def test_steps_without_fresh_samples_do_not_count():
    watch = MismatchWatch(dtype="fp32")
    for _ in range(5):
        assert not watch.check(gap(1.0) | {"rollout/staleness_max": 2.0})
    assert not watch.first


def test_a_statistic_that_appears_late_is_compared_with_its_own_first_values():
    """Staleness begins after some steps: from then on fresh samples have metrics of their own."""
    watch = MismatchWatch(dtype="fp32")
    for _ in range(5):
        assert not watch.check(gap(1e-6))
    late = {"rollout/staleness_max": 1.0, "mismatch/fresh_abs_diff_mean": 0.006}
    (message,) = watch.check(late)
    assert message.startswith("mismatch/fresh_abs_diff_mean > 0.005 (now 0.006): ")
    assert not watch.check(late | {"mismatch/fresh_abs_diff_mean": 0.004})
    assert watch.check(late)


def test_a_step_without_the_probe_forgets_nothing():
    watch = MismatchWatch(dtype="bf16")
    for _ in range(3):
        assert not watch.check({"mismatch/probe_mean": 0.003})
    assert len(watch.check({"mismatch/probe_mean": 0.016})) == 1
    assert not watch.check(gap(0.0))
    assert not watch.check({"mismatch/probe_mean": 0.016})  # it has been reported
