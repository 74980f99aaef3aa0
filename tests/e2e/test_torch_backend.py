"""--train.backend torch: without DeepSpeed, the same run as with it, for any number of ranks."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import sft_runs
import torch
from refusals import changes
from safetensors.torch import load_file
from sft_runs import PRECISION, TOKENS

from openrlhf.tasks.prepare import TaskFiles
from openrlhf.types import Metrics

WITHOUT_DEEPSPEED = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *args):
        return None if name.partition(".")[0] == "deepspeed" else self.finder.find_spec(name, *args)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from openrlhf.cli.train_sft import main
main(sys.argv[1:])
assert "deepspeed" not in sys.modules
print("trained without")
"""


@pytest.fixture
def train(task: TaskFiles, tmp_path: Path) -> Callable[..., dict[int, Metrics]]:
    """Returns `sft_runs.train` for runs in one folder."""
    return partial(sft_runs.train, task, tmp_path)


def check_same(tmp_path: Path, runs: dict[str, dict[int, Metrics]], steps: tuple[int, ...]) -> None:
    (name, one), (other_name, other) = runs.items()
    for step in steps:
        assert (one[step]["lr"], one[step]["num_tokens"]) == (other[step]["lr"], other[step]["num_tokens"])
        for key in ("sft/loss", "grad_norm"):
            assert one[step][key] == pytest.approx(other[step][key], abs=TOKENS * PRECISION), (step, key)
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in (name, other_name))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype
        torch.testing.assert_close(tensor, theirs[key], atol=TOKENS * PRECISION, rtol=0)


def test_sft_equals_that_of_deepspeed(train: Callable, tmp_path: Path) -> None:
    """The run has one rank and gradient checkpointing; a checkpoint of the other backend is refused."""
    torch_only = "--ds.param_dtype fp32 --model.gradient_checkpointing_enable --train.backend torch"
    runs = {
        "torch": train("torch", 1, torch_only),
        "deepspeed": train("deepspeed", 1, "--ds.param_dtype fp32"),
    }
    check_same(tmp_path, runs, (1, 2, 3, 4, 5, 6))
    with pytest.raises(AssertionError):
        train("refused", 1, f"{torch_only} --ckpt.load_enable")
    log = (tmp_path / "refused.log").read_text()
    assert ("--train.backend", "deepspeed", "torch") in changes(log)


def test_no_deepspeed_is_needed(task: TaskFiles, tmp_path: Path) -> None:
    argv = f"{sft_runs.flags(task)} --ds.param_dtype fp32 --train.backend torch --train.max_steps 1"
    command = [sys.executable, "-c", WITHOUT_DEEPSPEED, *shlex.split(argv)]
    command += ["--ckpt.output_dir", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "trained without" in done.stdout, done.stderr[-2000:]
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_sft_on_two_ranks_equals_that_of_deepspeed(train: Callable, tmp_path: Path, stage: int) -> None:
    """The run has gradient checkpointing."""
    common = f"--ds.param_dtype fp32 --ds.zero_stage {stage} --model.gradient_checkpointing_enable"
    runs = {
        "torch": train("torch", 2, f"{common} --train.backend torch"),
        "deepspeed": train("deepspeed", 2, common),
    }
    check_same(tmp_path, runs, (1, 2, 3, 4, 5, 6))


@pytest.mark.slow
def test_other_ranks_go_on(train: Callable, tmp_path: Path) -> None:
    """Two ranks train, then 1 from the checkpoint of step 2, then 2 from that of step 4."""
    latest = tmp_path / "ckpt" / "latest"
    common = "--ds.param_dtype fp32 --train.backend torch"
    whole = train("whole", 2, common)
    for name, ranks, begin in (("one", 1, 2), ("two", 2, 4)):
        latest.write_text(f"global_step{begin}")
        part = train(name, ranks, f"{common} --ckpt.load_enable")
        check_same(tmp_path, {name: part, "whole": whole}, tuple(range(begin + 1, 7)))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_half_precision_is_near_that_of_deepspeed(train: Callable, tmp_path: Path, num_ranks: int) -> None:
    """bf16 rounds by 2^-9: gradients added up in another order keep as many digits. The first loss is that of
    the same weights."""
    runs = {
        "torch": train("torch", num_ranks, "--adam.lr 1e-3 --train.backend torch"),
        "deepspeed": train("deepspeed", num_ranks, "--adam.lr 1e-3"),
    }
    ours, theirs = runs["torch"], runs["deepspeed"]
    assert ours[1]["sft/loss"] == pytest.approx(theirs[1]["sft/loss"], rel=2**-20)
    for step in theirs:
        assert ours[step]["grad_norm"] == pytest.approx(theirs[step]["grad_norm"], rel=2**-6)
        assert ours[step]["sft/loss"] == pytest.approx(theirs[step]["sft/loss"], rel=2**-8)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in runs)
    assert {t.dtype for t in one.values()} == {torch.bfloat16} == {t.dtype for t in other.values()}
