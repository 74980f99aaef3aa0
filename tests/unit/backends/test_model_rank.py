"""A rank of a model in training: steps that are not finite, and buckets of parameters."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused

from openrlhf.backends.model_rank import MAX_SKIPPED, TrainedRank, _buckets
from openrlhf.errors import ErrorCode

GOOD = {"sft/loss": 1.0, "grad_norm": 2.0}


def rank(**changes: Any) -> Any:
    plain = {"scales_loss": False, "skips_nonfinite": False, "skipped": 0, "steps": 3}
    return SimpleNamespace(**(plain | changes))


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("bad", [{"sft/loss": math.nan}, {"sft/loss": math.inf, "grad_norm": math.nan}])
def test_a_loss_that_is_not_finite_ends_the_run(scales: bool, bad: dict[str, float]) -> None:
    with refused(ErrorCode.NOT_FINITE, told=f"optimizer step 3: sft/loss is {bad['sft/loss']}"):
        TrainedRank._finite(rank(scales_loss=scales), GOOD | bad)


def test_an_overflow_is_left_to_the_loss_scaler() -> None:
    """The loss scaler skips the step and lowers its scale."""
    metrics = GOOD | {"grad_norm": math.inf}
    assert TrainedRank._finite(rank(scales_loss=True), metrics) == metrics
    with refused(ErrorCode.NOT_FINITE):
        TrainedRank._finite(rank(), metrics)


def test_so_many_steps_may_be_skipped_in_a_row() -> None:
    one, bad = rank(skips_nonfinite=True), GOOD | {"sft/loss": math.nan}
    for _ in range(2):
        for _ in range(MAX_SKIPPED):
            assert TrainedRank._finite(one, bad) == {"grad_norm": 2.0, "skipped": 1.0}
        assert TrainedRank._finite(one, GOOD) == GOOD | {"skipped": 0.0}
    for _ in range(MAX_SKIPPED):
        TrainedRank._finite(one, bad)
    with refused(ErrorCode.NOT_FINITE, told=f"the {MAX_SKIPPED} steps before it were skipped"):
        TrainedRank._finite(one, bad)


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([], []),
        ([4], ["a"]),
        ([4, 6, 1], ["ab", "c"]),
        ([4, 5, 1, 10, 3, 7], ["abc", "d", "ef"]),
        ([99, 1], ["a", "b"]),
    ],
)
def test_buckets_are_full_or_last(sizes: list[int], buckets: list[str]) -> None:
    found = _buckets("abcdef"[: len(sizes)], sizes, capacity=10)
    assert ["".join(bucket) for bucket in found] == buckets
