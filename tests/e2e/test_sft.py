"""Supervised fine-tuning through its commands: every launcher, layout and resume gives the same model."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare import TaskFiles

BIN = Path(sys.executable).parent
MODULE = "openrlhf.cli.train_sft"
LAUNCHERS = {
    "console": f"{BIN / 'openrlhf'} sft",
    "torchrun": f"{BIN / 'torchrun'} --standalone --nproc_per_node 2 -m {MODULE}",
    "deepspeed": f"{BIN / 'deepspeed'} --num_accelerators 2 --module {MODULE}",
}
LAYOUTS = {
    "forked": "--train.micro_batch_size 1 --ds.zero_stage 0",
    "console": "--train.dynamic_batch_enable --train.max_tokens_per_gpu 200 --ds.zero_stage 2",
    "torchrun": "--train.micro_batch_size 4 --ds.zero_stage 3",
    "deepspeed": "--train.micro_batch_size 8 --ds.zero_stage 2 --ds.ring_attn_size 2",
}
STEPS = 10
ROW_COUNTER = f"{Path(__file__).with_name('row_counter.py')}:RowCounter"


def sft(task: TaskFiles, folder: Path, launcher: str, flags: str) -> dict[int, dict[str, float]]:
    """Trains and returns the metrics of each step; what the run prints goes to `folder`/log."""
    flags = (
        f"--model.model_name_or_path {task.model} --data.dataset {task.sft} --data.output_key output "
        "--data.apply_chat_template --data.max_samples 80 --data.max_len 128 --train.batch_size 16 "
        "--train.max_epochs 2 --adam.lr 1e-3 --adam.eps 1e-3 --ds.param_dtype fp32 "
        f"--eval.dataset {task.sft} --eval.max_samples 20 --ckpt.output_dir {folder / 'model'} "
        f"--ckpt.path {folder / 'ckpt'} --logger.run_dir {folder / 'run'} --train.hooks {ROW_COUNTER} {flags}"
    )
    if launcher == "forked":
        run_ranks([MODULE, *shlex.split(flags)], log=folder / "log")
    else:
        words = shlex.split(f"{LAUNCHERS[launcher]} {flags}")
        with (folder / "log").open("wb") as log:
            done = subprocess.run(words, stdout=log, stderr=log, timeout=300)
        assert done.returncode == 0, (folder / "log").read_text()[-3000:]
    return read_metrics(folder / "run" / "metrics.jsonl")


@pytest.fixture(scope="module")
def reference(task: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("reference")
    return folder, sft(task, folder, "forked", LAYOUTS["forked"])


@pytest.mark.parametrize(
    "launcher", ["console", pytest.param("torchrun", marks=pytest.mark.slow), "deepspeed"]
)
def test_launchers_and_layouts_agree(task, tmp_path, reference, launcher):
    folder, expected = reference
    metrics = sft(task, tmp_path, launcher, LAYOUTS[launcher])
    assert list(metrics) == list(expected) == list(range(1, STEPS + 1))
    for step in metrics:
        for name in ("sft/loss", "grad_norm", "lr", "num_tokens"):
            assert metrics[step][name] == pytest.approx(expected[step][name], rel=1e-4), (step, name)
    assert metrics[STEPS]["eval/sft/loss"] == pytest.approx(expected[STEPS]["eval/sft/loss"], rel=1e-4)
    assert all(metrics[step]["packed_rows"] >= 1 for step in metrics), "a hook adds this metric"
    assert metrics[1]["lr"] == pytest.approx(1e-3), "the first step is not made with 0"
    assert metrics[STEPS]["sft/loss"] < metrics[1]["sft/loss"] - 0.3
    ours, theirs = (AutoModelForCausalLM.from_pretrained(f / "model") for f in (tmp_path, folder))
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    if launcher == "console":
        check_progress((tmp_path / "log").read_bytes().decode())


def check_progress(printed: str) -> None:
    """Checks that progress is plain lines, which quick steps share."""
    assert "\x1b" not in printed and "\r" not in printed
    lines = re.findall(rf" step (\d+)/{STEPS}(?: \((\d) steps\))?  loss \d.*", printed)
    assert lines[0] == ("1", "") and lines[-1][0] == str(STEPS)
    assert sum(int(steps or 1) for _, steps in lines) == STEPS


def test_resume_continues_in_the_middle_of_an_epoch(task, tmp_path, reference):
    """A run that saved after steps 3 and 6, was killed and resumed at 6 has the losses of the uninterrupted
    run."""
    folder, expected = reference
    flags = f"{LAYOUTS['forked']} --ckpt.save_steps 3 --ckpt.max_num 1"
    sft(task, tmp_path, "forked", flags)
    checkpoints = tmp_path / "ckpt"
    assert (checkpoints / "latest").read_text() == "global_step9"
    assert [p.name for p in checkpoints.glob("global_step*")] == ["global_step9"]
    metrics = sft(task, tmp_path, "forked", f"{flags} --ckpt.load_enable")
    assert list(metrics) == list(range(1, STEPS + 1))
    assert metrics[STEPS]["sft/loss"] == expected[STEPS]["sft/loss"]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(f / "model") for f in (tmp_path, folder))
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b)
