"""Muon through the command: one step changes a weight as Newton-Schulz says, and layout and resume change
nothing."""

import shlex
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from transformers import AutoModelForCausalLM

from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare import TaskFiles

LR = {"muon": 0.02, "adam": 1e-3}


def train(task: TaskFiles, folder: Path, ranks: int, flags: str) -> dict[int, float]:
    """Trains and returns the loss of each step."""
    command = (
        f"openrlhf.cli.train_sft --model.model_name_or_path {task.model} --data.dataset {task.sft} "
        "--data.output_key output --data.apply_chat_template --data.max_len 128 --data.max_samples 64 "
        "--train.batch_size 16 --train.max_epochs 1 --optim muon --max_norm 0 --lr_scheduler constant "
        f"--muon.lr {LR['muon']} --adam.lr {LR['adam']} --ds.param_dtype fp32 --ckpt.path {folder}/ckpt "
        f"--ckpt.output_dir {folder}/model --logger.run_dir {folder}/run {flags}"
    )
    run_ranks(shlex.split(command), ranks, log=folder / "log")
    return {step: m["sft/loss"] for step, m in read_metrics(folder / "run" / "metrics.jsonl").items()}


@pytest.fixture(scope="module")
def reference(task: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("stage0")
    return train(task, folder, 1, "--ds.zero_stage 0 --train.micro_batch_size 8")


def test_a_step_is_orthogonal_for_matrices_and_adam_for_the_rest(task: TaskFiles, tmp_path: Path) -> None:
    """Newton-Schulz with Muon's coefficients brings the singular values of an update near 1, times sqrt(rows
    / columns) where there are more rows; Adam's first step is its learning rate."""
    train(task, tmp_path, 1, "--ds.zero_stage 2 --data.max_samples 16 --train.micro_batch_size 4")
    before, after = (
        dict(AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).named_parameters())
        for f in (task.model, tmp_path / "model")
    )
    for name, weight in before.items():
        update = (after[name] - weight).detach()
        if "proj" in name:
            rows, columns = update.shape
            singular = torch.linalg.svdvals(update) / (LR["muon"] * max(1, rows / columns) ** 0.5)
            assert 0.5 < singular.median() < 1.3 and singular.max() < 1.4, name
        else:
            largest = update.abs().max().item()
            assert largest == pytest.approx(LR["adam"], rel=0.05), name


@pytest.mark.parametrize(("stage", "ranks"), [(2, 2), (3, 2)])
def test_losses_do_not_depend_on_the_layout(task, tmp_path, reference, stage, ranks):
    losses = train(task, tmp_path, ranks, f"--ds.zero_stage {stage} --train.micro_batch_size 4")
    # Newton-Schulz runs in bfloat16: another order of additions moves an update by up to 2^-8 of its size,
    # and the decrease of the loss by the same share.
    assert losses == pytest.approx(reference, abs=2**-8 * (reference[1] - reference[4]))
    assert losses[4] < losses[1] - 0.5


def test_resume_keeps_the_momentum(task: TaskFiles, tmp_path: Path, reference: dict[int, float]) -> None:
    flags = "--ds.zero_stage 2 --train.micro_batch_size 8 --ckpt.save_steps 2 --ckpt.max_num 3"
    whole = train(task, tmp_path, 1, flags)
    assert whole == pytest.approx(reference, abs=2**-8 * (reference[1] - reference[4]))
    (tmp_path / "ckpt" / "latest").write_text("global_step2")
    assert train(task, tmp_path, 1, f"{flags} --ckpt.load_enable") == whole
