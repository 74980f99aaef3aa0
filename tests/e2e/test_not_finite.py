"""NaN and infinity in each kind of tensor of a training step are neither applied nor saved, and all ranks
agree."""

import re
from collections.abc import Callable
from math import isfinite

import pytest

from openrlhf.tasks.prepare import TaskFiles

TORCH = {"backend": "torch", "param_dtype": "fp32"}
CASES = [
    pytest.param(2, [TORCH, {"zero_stage": 0, "param_dtype": "fp32"}, {"zero_stage": 3}], id="sample"),
    pytest.param(
        2,
        [{"zero_stage": s, "param_dtype": t} for s in range(4) for t in ("bf16", "fp32")]
        + [TORCH | {"zero_stage": s, "param_dtype": t} for s in (2, 3) for t in ("bf16", "fp32")]
        + [{"zero_stage": 1, "param_dtype": "bf16", "grad_accum_dtype": "fp32"}],
        id="all",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        1,
        [TORCH, *({"zero_stage": s, "param_dtype": t} for s in range(4) for t in ("bf16", "fp32"))],
        id="one rank",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("num_ranks", "cases"), CASES)
def test_not_finite(task: TaskFiles, run_worker: Callable, num_ranks: int, cases: list[dict]) -> None:
    reports = run_worker("not_finite", num_ranks, model=str(task.model), cases=cases)
    for case, found in [x for report in reports for x in zip(cases, report["cases"], strict=True)]:
        for step, (what, skip) in enumerate(found["skips"].items(), 2):
            assert (skip["changed"], skip["step"]) == (0, step), (case, what)
            assert skip["metrics"]["skipped"] == 1 and all(map(isfinite, skip["metrics"].values()))
            assert "grad_norm" not in skip["metrics"], (case, what)
            assert ("sft/loss" in skip["metrics"]) == (what in ("loss", "infinite loss", "gradient")), what
        good = found["good"]
        assert good["metrics"]["skipped"] == 0 and good["changed"] > 10, case
        assert good["lr"] == pytest.approx([1e-2, 0.95e-2]), "the schedule counts skipped steps"
        last = num_ranks - 1
        assert found["weights alone"] == ""
        assert re.match(r"not-finite: .*\bstep 6\b", found["state"])
        assert "exp_avg_sq" in found["state"] and f" on rank {last}." in found["state"], case
        for what in ("save nan", "export nan", "save -inf", "export -inf"):
            assert re.match(r"not-finite: .*\bstep 6\b", found[what]), (case, what)
        assert found["files"] == [] and found["saved"] > 2
        skipped, stopped = found["again"]
        assert skipped == [""] * 10 and re.match(r"not-finite: .*\b10 steps\b", stopped), case
        assert f" on rank {last}." in found["weight"], case
        assert re.match(r"not-finite: .*\bstep 1\b.*\bgrad_norm\b", found["stop"]), case
        assert found["stop changed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["step.weights:nan@3", "step.loss:nan@3"])
def test_a_run_saves_only_finite_weights(task, openrlhf, tmp_path, monkeypatch, fault):
    command = (
        f"sft --model.model_name_or_path {task.model} --data.dataset {task.sft} --data.output_key output "
        f"--data.max_samples 32 --train.batch_size 4 --train.micro_batch_size 4 --ds.param_dtype fp32 "
        f"--ckpt.output_dir {tmp_path} --ckpt.save_steps 1 --ckpt.max_num 9 --train.max_epochs 1"
    )
    monkeypatch.setenv("OPENRLHF_FAULT", fault)
    with pytest.raises(AssertionError, match=r"\[not-finite\](.|\n)*global_step2"):
        openrlhf(command)
    (last,) = tmp_path.rglob("global_step2")
    assert {path.name for path in last.parent.glob("global_step*")} == {"global_step1", "global_step2"}
    assert not list(tmp_path.glob("*.safetensors"))
