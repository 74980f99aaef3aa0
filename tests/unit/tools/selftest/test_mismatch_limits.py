"""The limits at which a run warns of the mismatch between sampler and trainer, or stops."""

import math
import re

import pytest
import torch
from refusals import refused

from openrlhf.algorithms.mismatch import mismatch_metrics
from openrlhf.errors import ErrorCode
from openrlhf.tools.selftest.mismatch import MismatchWatch, check_mismatch, fresh_mismatch

NOW, SAMPLER = torch.full((5,), -1.0), torch.tensor([-1.0, -1, -2, -3, -3])


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
    with refused(ErrorCode.WRONG_WEIGHTS) as error:
        check_mismatch(gap(0.002), "bf16", 0.001, 1)
    assert "at most 0.001:" in error.value.text


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
