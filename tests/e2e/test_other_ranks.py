"""A run that resumes on another number of ranks, at another ZeRO stage, equals the uninterrupted run."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sft_runs
import torch
from safetensors.torch import load_file
from sft_runs import PRECISION, TOKENS

from openrlhf.checkpoint.zero import MASTER, Checkpoint
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.types import Metrics

SCRIPT = Path(__file__).parents[2] / "examples" / "scripts" / "ckpt_ds_zero_to_universal.sh"
STAGES = (0, 1, 2, 3)
ADAM = {MASTER, "exp_avg", "exp_avg_sq"}
MUON = {*ADAM, "momentum_buffer"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "stages", "keys"),
    [
        pytest.param({}, STAGES, ADAM, id="adam"),
        pytest.param({"rank": 4}, STAGES, ADAM, id="lora"),
        pytest.param({"optim": "muon"}, STAGES, MUON, id="muon"),
        pytest.param({"dtype": "bf16"}, STAGES, ADAM, id="bf16"),
        pytest.param({"dtype": "bf16", "grad_accum_dtype": "fp32"}, (1, 3), ADAM, id="bf16 and fp32"),
    ],
)
def test_every_state_is_in_its_parameter(task, run_worker, tmp_path, options, stages, keys):
    """Two ranks save at each stage; one rank loads, saves again at each stage, and then trains on."""
    run = lambda ranks, jobs: run_worker("resharding", ranks, model=str(task.model), jobs=jobs)[0]
    at = lambda stage, folder, **more: {"stage": stage, "save": f"{tmp_path}/{folder}", **options, **more}
    run(2, [at(stage, f"saved{stage}", until=2) for stage in stages])
    pairs = {f"from{was}to{is_}": (was, is_) for was in stages for is_ in stages}
    jobs = [
        at(is_, name, load=f"{tmp_path}/saved{was}", until=2, then=6) for name, (was, is_) in pairs.items()
    ]
    whole, *reports = run(1, [at(stages[0], "whole", until=6), *jobs])
    for (name, (was, _)), report in zip(pairs.items(), reports, strict=True):
        check_same_states(tmp_path / f"saved{was}" / "one", tmp_path / name / "one", keys)
        assert report["lr"] == pytest.approx(whole["lr"][2:], rel=1e-12)
        if keys == ADAM and "dtype" not in options:
            assert report["sft/loss"] == pytest.approx(whole["sft/loss"][2:], abs=107 * PRECISION), name
            check_same_model(tmp_path / name / "model", tmp_path / "whole" / "model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "keys"),
    [
        pytest.param({}, ADAM, id="adam"),
        pytest.param({"dtype": "bf16"}, ADAM, id="bf16"),
        pytest.param({"optim": "muon"}, MUON, id="muon"),
    ],
)
def test_a_resume_on_as_many_ranks_is_the_continuation(task, run_worker, tmp_path, options, keys):
    """It has the same losses, gradient norms and learning rates, to the last bit."""
    jobs = [
        {"stage": stage, "save": f"{tmp_path}/{name}{stage}", "until": 2, "then": 6, **options, **load}
        for stage in STAGES
        for name, load in (("saved", {}), ("resumed", {"load": f"{tmp_path}/saved{stage}"}))
    ]
    reports, _ = run_worker("resharding", 2, model=str(task.model), jobs=jobs)
    for stage, whole, resumed in zip(STAGES, reports[::2], reports[1::2], strict=True):
        assert {name: values[2:] for name, values in whole.items()} == resumed
        check_same_states(tmp_path / f"saved{stage}" / "one", tmp_path / f"resumed{stage}" / "one", keys)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_offload_may_change(task: TaskFiles, run_worker: Callable, tmp_path: Path, stage: int) -> None:
    """A run resumes on as many ranks, and on fewer."""
    run = lambda ranks, jobs: run_worker("resharding", ranks, model=str(task.model), jobs=jobs)[0]
    at = lambda folder, **more: {"stage": stage, "save": f"{tmp_path}/{folder}", "until": 2, **more}
    folders = {False: "on_device", True: "on_host"}
    whole, _ = run(2, [at("whole", until=6), at("on_device"), at("on_host", offload=True)])[::2]
    changed = [
        at(f"{folder}_no_more", load=f"{tmp_path}/{folder}", offload=not offload, then=6)
        for offload, folder in folders.items()
    ]
    for report in (*run(2, changed), *run(1, changed)):
        assert report["sft/loss"] == pytest.approx(whole["sft/loss"][2:], abs=107 * PRECISION)
        for folder in folders.values():
            states = (tmp_path / name / "one" for name in (folder, f"{folder}_no_more"))
            check_same_states(*states, ADAM)


def check_same_states(one: Path, other: Path, keys: set[str]) -> None:
    checkpoints = [Checkpoint(folder) for folder in (one, other)]
    names = checkpoints[0].model_states()["parameters_in_order"]
    ours, theirs = (checkpoint.states(names) for checkpoint in checkpoints)
    assert {MASTER, *ours.keys(names)} == keys
    for name in names:
        numel = ours.numel(name)
        assert numel == theirs.numel(name) > 0
        assert ours.scalars[name] == theirs.scalars[name]
        assert ours.fragments[name][0].vectors.keys() == theirs.fragments[name][0].vectors.keys()
        for key in ours.keys([name]) | {MASTER}:
            one_key, other_key = (states.read(name, key, 0, numel) for states in (ours, theirs))
            assert torch.equal(one_key, other_key), (name, key)


def check_same_model(one: Path, other: Path) -> None:
    """Compares the exported weights, which are the moving averages."""
    ours, theirs = (load_file(next(folder.glob("*.safetensors"))) for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=107 * PRECISION, rtol=0)


@pytest.fixture
def train(task: TaskFiles, tmp_path: Path) -> Callable[..., dict[int, Metrics]]:
    """Returns `sft_runs.train` for float32 runs in one folder."""
    return lambda name, ranks, more: sft_runs.train(
        task, tmp_path, name, ranks, f"--ds.param_dtype fp32 {more}"
    )


@pytest.mark.slow
def test_the_same_command_with_other_ranks_goes_on(train: Callable, tmp_path: Path) -> None:
    """The run has 2 ranks at stage 2, then 4 at stage 3, then 1 at stage 1; it also resumes on 1 rank from
    the universal form, in which DeepSpeed's converter finds the same states. Every step learns from the same
    samples."""
    latest = tmp_path / "ckpt" / "latest"
    whole = train("whole", 2, "--ds.zero_stage 2")
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    latest.write_text("global_step2")
    parts = {"four": train("four", 4, "--ds.zero_stage 3 --ckpt.load_enable")}
    latest.write_text("global_step4")
    environment = {
        **os.environ,
        "CKPT": str(latest.parent),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    subprocess.run(["bash", str(SCRIPT)], env=environment, check=True, capture_output=True)
    check_same_states(*(tmp_path / "ckpt" / f"global_step4{form}" for form in ("", "_universal")), ADAM)
    parts["one"] = train("one", 1, "--ds.zero_stage 1 --ckpt.load_enable")
    latest.write_text("global_step4")
    parts["converted"] = train("converted", 1, "--ds.zero_stage 2 --ckpt.load_enable --ds.use_universal_ckpt")
    assert "global_step4_universal: step 4, written " in (tmp_path / "converted.log").read_text()
    for name, part in parts.items():
        assert list(part) == ([3, 4, 5, 6] if name == "four" else [5, 6])
        for step, metrics in part.items():
            assert metrics["num_tokens"] == whole[step]["num_tokens"]
            assert metrics["lr"] == whole[step]["lr"]
            assert metrics["sft/loss"] == pytest.approx(whole[step]["sft/loss"], abs=TOKENS * PRECISION)
