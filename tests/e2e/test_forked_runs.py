"""A run that continues another with settings of its own."""

import json
import shlex

import pytest
import torch
from processes import run_ranks
from transformers import AutoModelForCausalLM

from openrlhf.observability.trackers.metrics_file import read_metrics


@pytest.fixture(scope="module")
def first_half() -> dict[str, float]:
    """Keeps the last loss of the first layout's fork with other settings, which all others must reproduce."""
    return {}


@pytest.mark.parametrize(
    "layout",
    [
        "--ds.zero_stage 2",
        pytest.param("--ds.zero_stage 0", marks=pytest.mark.slow),
        pytest.param("--ds.zero_stage 3", marks=pytest.mark.slow),
        "--train.backend torch",
    ],
)
def test_a_fork_continues_with_its_own_settings(task, tmp_path, layout, first_half):
    """Without a difference it equals the other run bit for bit. With other settings of AdamW, its first loss
    is the same, and its first step that of these settings, in every layout."""

    def sft(name: str, flags: str = "") -> dict[int, dict[str, float]]:
        flags = (
            f"--model.model_name_or_path {task.model} --data.dataset {task.sft} --data.output_key output "
            "--data.apply_chat_template --data.max_samples 16 --data.max_len 128 --train.batch_size 4 "
            "--train.micro_batch_size 4 --train.max_epochs 1 --adam.lr 1e-3 --adam.weight_decay 0.1 "
            f"--ds.param_dtype fp32 --ckpt.save_steps 2 --ckpt.output_dir {tmp_path / name} "
            f"--logger.run_dir {tmp_path / name}/run {layout} {flags}"
        )
        run_ranks(["openrlhf.cli.train_sft", *shlex.split(flags)], log=tmp_path / f"{name}.log", num_ranks=1)
        return read_metrics(tmp_path / name / "run" / "metrics.jsonl")

    fork = f"--ckpt.load_enable --ckpt.fork_from {tmp_path}/whole/checkpoints/global_step2"
    whole, same = sft("whole"), sft("same", fork)
    half = sft("half", f"{fork} --adam.lr 5e-4 --adam.weight_decay 0 --adam.betas 0.5 0.9")
    assert list(same) == list(half) == [3, 4]
    weights = {
        name: AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "same")
    }
    for name, weight in weights["whole"].items():
        assert torch.equal(weight, weights["same"][name]), name
    for step in (3, 4):
        assert same[step]["sft/loss"] == whole[step]["sft/loss"]
        assert half[step]["lr"] == pytest.approx(whole[step]["lr"] / 2)
    assert half[3]["sft/loss"] == whole[3]["sft/loss"] and half[4]["sft/loss"] != whole[4]["sft/loss"]
    loss = first_half.setdefault("loss", half[4]["sft/loss"])
    assert half[4]["sft/loss"] == pytest.approx(loss, rel=1e-5)
    record = json.loads((tmp_path / "half/run/fork.json").read_text())
    assert {flag: values["now"] for flag, values in record["changed"].items()} == {
        "--adam.lr": "0.0005",
        "--adam.weight_decay": "0.0",
        "--adam.betas": "0.5 0.9",
    }
    assert "--adam.lr was 0.001, is 0.0005" in (tmp_path / "half.log").read_text()
