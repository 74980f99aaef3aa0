"""DeepSpeed's optimizers by configuration, with DeepSpeed's own code: which one is built, whether its state
can leave the device, how the gradients of micro-batches add up, and what a step asks of its device."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_checks import ppo_problems
from openrlhf.config.sections import ScorerDeepSpeedConfig
from openrlhf.tasks.prepare import TaskFiles

OPTIMIZERS = {
    # (ZeRO stage, type of the weights, of accumulated gradients, offload) -> DeepSpeed's wrapper
    **{(stage, "*", "*", "*"): "DeepSpeedZeroOptimizer" for stage in (1, 2)},
    (3, "*", "*", "*"): "DeepSpeedZeroOptimizer_Stage3",
    (1, "bf16", "fp32", False): "BF16_Optimizer",
    (0, "fp32", "*", "*"): "AdamW",
    **{(0, dtype, "*", "*"): "FP16_UnfusedOptimizer" for dtype in ("bf16", "fp16")},
    **{(0, dtype, "fp32", "*"): "NotImplementedError" for dtype in ("bf16", "fp16")},
}
"""Optimizers by configuration; the last row that fits applies."""
KINDS = {
    "adam": ["exp_avg", "exp_avg_sq", "master", "step", "weight"],
    "muon": ["exp_avg", "exp_avg_sq", "master", "momentum_buffer", "weight"],
}
CAN_SLEEP = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


slow = pytest.mark.slow


def expected(case: dict[str, Any]) -> str:
    fits = [
        name
        for row, name in OPTIMIZERS.items()
        if all(wanted in ("*", value) for wanted, value in zip(row, case.values(), strict=True))
    ]
    return fits[-1]


def refused(case: dict[str, Any], *, sleep: bool) -> bool:
    config = PPOConfig(ds=ScorerDeepSpeedConfig(**case, enable_sleep=sleep))
    return any(problem.key.startswith("ds.") and problem.fatal for problem in ppo_problems(config, {}))


@slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_optimizer_of_each_configuration(task: TaskFiles, run_worker: Callable, dtype: str) -> None:
    """No configuration needs a compiler; one that does not exist, or whose state cannot be offloaded, is
    refused before anything starts."""
    cases = [
        {"zero_stage": stage, "param_dtype": dtype, "grad_accum_dtype": accumulated, "adam_offload": offload}
        for stage, offload in product(range(4), (False, True))
        for accumulated in dict.fromkeys((None, dtype, "fp32"))
        if stage > 0 or not offload
    ]
    (report,) = run_worker("optimizer_states", 1, part="build", model=str(task.model), cases=cases)
    for case, (wrapper, *inside) in zip(cases, report["cases"], strict=True):
        assert wrapper == expected(case), case
        assert inside in ([], ["AdamW"]), case
        assert refused(case, sleep=False) == (not inside), case
        assert refused(case, sleep=True) == (wrapper not in CAN_SLEEP), case


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "offload", "optim"),
    [
        (1, "bf16", False, "adam"),
        pytest.param(2, "bf16", False, "adam", marks=slow),
        pytest.param(1, "bf16", True, "adam", marks=slow),
        pytest.param(1, "fp32", False, "adam", marks=slow),
        pytest.param(1, "bf16", False, "muon", marks=slow),
        pytest.param(2, "bf16", False, "muon", marks=slow),
    ],
)
def test_what_sleeps_is_gone_and_comes_back_bit_for_bit(task, run_worker, num_ranks, dtype, offload, optim):
    common = {"param_dtype": dtype, "adam_offload": offload, "optim": optim}
    cases = [common | {"zero_stage": stage} for stage in (1, 2, 3)]
    reports = run_worker("optimizer_states", num_ranks, part="sleep", model=str(task.model), cases=cases)
    for case, found in [x for report in reports for x in zip(cases, report["cases"], strict=True)]:
        assert found["kinds"] == KINDS[optim], case
        assert found["changed"] == [] and found["num_states"] > 20, case
        assert found["refused"].count("reload() comes first") == 2, case
        assert found["restored"], case
        if case["zero_stage"] == 3:  # DeepSpeed's default buffer would hold 500 million gradients
            assert found["freed"] >= 1e9 + (0 if case["adam_offload"] else found["moved"]), case
        else:
            expected = 0 if case["adam_offload"] else found["moved"] + found["forgotten"]
            assert found["freed"] == expected, case
            assert bool(found["forgotten"]) == (optim == "muon"), case
        assert bool(found["used_anyway"]) == (found["freed"] > 0), case


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_configuration_makes_muons_updates_orthogonal(task, run_worker, num_ranks):
    """Newton-Schulz brings the largest singular value near 1, times sqrt(rows / columns) where there are more
    rows; a plain gradient would have any size."""
    cases = [{"zero_stage": stage, "param_dtype": t} for stage in range(4) for t in ("bf16", "fp32")]
    cases += [
        {"zero_stage": 1, "param_dtype": "bf16", "grad_accum_dtype": "fp32"},  # DeepSpeed's BF16_Optimizer
        {"zero_stage": 2, "param_dtype": "bf16", "overlap_comm": True},
    ]
    cases = [case | {"optim": "muon"} for case in cases]
    reports = run_worker("optimizer_states", num_ranks, part="step", model=str(task.model), cases=cases)
    for case, found in [x for report in reports for x in zip(cases, report["cases"], strict=True)]:
        largest = {name: max(values) for name, values in found.items()}
        assert len(largest) > 10
        assert all(0.7 < value < 1.4 for value in largest.values()), (case, largest)


ADDED = [{"zero_stage": stage, "adam_offload": offload} for stage in (2, 3) for offload in (False, True)]
ADDED += [{"zero_stage": 2, "overlap_comm": True}]
LOSSY = [{"zero_stage": 2, "grad_accum_dtype": "bf16"}]


def test_gradients_of_many_micro_batches_add_up_in_float32(task: TaskFiles, run_worker: Callable) -> None:
    """Weights and their gradients are bfloat16, with 8 bits. A float32 sum of n of them errs by at most (n -
    1) 2^-24 of the sum of their sizes; a bfloat16 sum, for contrast, exceeds that bound."""
    num_rows = 20
    cases = [case | {"param_dtype": "bf16"} for case in ADDED + LOSSY]
    (report,) = run_worker(
        "optimizer_states", 1, part="accumulate", model=str(task.model), num_rows=num_rows, cases=cases
    )
    errors = [found["error"] for found in report["cases"]]
    assert all(error <= (num_rows - 1) * 2**-24 for error in errors[: len(ADDED)]), errors
    assert all(error > 2**-12 for error in errors[len(ADDED) :]), errors


PLAIN = {"reduced": 5 * 10**8, "gathered": 5 * 10**8, "overlaps": False, "gradients": "float32"}
SMALL = {"reduced": 2**18, "gathered": 2**18}
ARRANGED = [
    # flags -> the settings that DeepSpeed receives
    ({}, {}),
    ({"bucket_mb": 1}, SMALL),
    ({"overlap_comm": True}, {"overlaps": True}),
    ({"overlap_comm": True, "bucket_mb": 1}, SMALL | {"overlaps": True}),
]


@slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_arrangements_of_messages_change_nothing(task: TaskFiles, run_worker: Callable, stage: int) -> None:
    """Four ranks take two steps. A weight is moved by g / (|g| + eps), and the sum g of 16 gradients errs by
    16 roundings of a number that is at most the clipped norm, 1."""
    arranged = list(ARRANGED)
    if stage == 3:
        arranged += [({"zpg": ranks}, {"gather_among": ranks}) for ranks in (2, 4)]
    cases = [{"zero_stage": stage, "param_dtype": "fp32"} | flags for flags, _ in arranged]
    reports = run_worker("optimizer_states", 4, part="arrange", model=str(task.model), cases=cases)
    for of_case, (_, told) in [x for r in reports for x in zip(r["cases"], arranged, strict=True)]:
        expected = PLAIN | {"gather_among": None} | told
        if stage == 3:  # stage 3 always overlaps, and gathers weights where they are used
            expected |= {"gathered": None, "overlaps": True, "gather_among": told.get("gather_among", 4)}
        apart = of_case.pop("apart")
        assert of_case == expected
        assert apart < 2 * 16 * 2**-24 / 1e-3, of_case


def test_micro_batches_do_not_wait_for_the_device(task: TaskFiles, run_worker: Callable) -> None:
    """Only the optimizer's step waits: it asks whether the norm of the gradients is finite."""
    cases = [{"zero_stage": stage, "param_dtype": "bf16"} for stage in (1, 2, 3)]
    (report,) = run_worker("optimizer_states", 1, part="wait", model=str(task.model), cases=cases)
    for case, found in zip(cases, report["cases"], strict=True):
        assert found["loop"] == [], case
        assert len(found["step"]) <= 8, case
