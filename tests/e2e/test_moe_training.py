"""A mixture of experts trained through the command: it learns, and its load is balanced."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from processes import run_ranks

from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare import TaskFiles

STEPS = 12
COEF = 0.5


@pytest.fixture(scope="module")
def model(task: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    tokenizer = hf.AutoTokenizer.from_pretrained(task.model)
    config = hf.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # pyrefly: ignore[unexpected-keyword]
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sft(task: TaskFiles, model: Path, folder: Path, ranks: int, flags: str) -> dict[int, dict[str, float]]:
    command = (
        f"openrlhf.cli.train_sft --model.model_name_or_path {model} --data.dataset {task.sft} "
        "--data.output_key output --data.apply_chat_template --data.max_samples 48 --train.batch_size 8 "
        "--train.micro_batch_size 1 --train.max_epochs 2 --adam.lr 5e-3 --ds.param_dtype fp32 "
        f"--ckpt.output_dir {folder / 'model'} --logger.run_dir {folder / 'run'} {flags}"
    )
    folder.mkdir()
    run_ranks(shlex.split(command), ranks, log=folder / "log")
    return read_metrics(folder / "run" / "metrics.jsonl")


@pytest.mark.parametrize("backend", ["deepspeed", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_mixture_of_experts_learns_and_balances(task, model, tmp_path, backend):
    """With one sequence in each row the balance loss depends on neither ranks nor sharding."""
    balanced = f"--model.aux_loss_coef {COEF}"
    one = sft(task, model, tmp_path / "one", 1, f"--ds.zero_stage 0 {balanced}")
    shared = f"--train.backend {backend} --ds.zero_stage 3 {balanced}"
    two = sft(task, model, tmp_path / "two", 2, shared)
    assert list(one) == list(two) == list(range(1, STEPS + 1))
    for step in one:
        for name in ("sft/loss", "balance_loss", "grad_norm"):
            assert two[step][name] == pytest.approx(one[step][name], rel=2e-3), (step, name)
    assert one[STEPS]["sft/loss"] < one[1]["sft/loss"] - 0.5
    assert one[STEPS]["balance_loss"] - 2 < 0.5 * (one[1]["balance_loss"] - 2)
    hf.AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "model")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["deepspeed", "torch"])
def test_frozen_routers_stay_as_they_are_through_a_resume(task, model, tmp_path, backend):
    """On two ranks that shard the weights. A run that resumes from step 8 ends with the bits of one that does
    not stop."""
    flags = f"--model.freeze_moe_router --train.backend {backend} --ds.zero_stage 3 --ckpt.save_steps 4"
    whole = sft(task, model, tmp_path / "whole", 2, f"{flags} --ckpt.path {tmp_path / 'ckpt'}")
    shutil.rmtree(tmp_path / "ckpt" / f"global_step{STEPS}")
    (tmp_path / "ckpt" / "latest").write_text("global_step8")
    again = sft(
        task, model, tmp_path / "again", 2, f"{flags} --ckpt.path {tmp_path / 'ckpt'} --ckpt.load_enable"
    )
    assert again[STEPS]["sft/loss"] == whole[STEPS]["sft/loss"] < whole[1]["sft/loss"] - 0.5
    before, after, resumed = (
        hf.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (model, tmp_path / "whole" / "model", tmp_path / "again" / "model")
    )
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert len(routers) == 2
    assert {name for name in before if torch.equal(before[name], after[name])} == routers
    assert all(torch.equal(after[name], resumed[name]) for name in after)


@pytest.fixture(scope="module")
def hybrid(task: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a model with linear attention in one layer, plain attention in the other, and experts in
    both."""
    folder = tmp_path_factory.mktemp("hybrid")
    tokenizer = hf.AutoTokenizer.from_pretrained(task.model)
    config = hf.Qwen3NextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,  # vLLM has CPU kernels for 64 and 128
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_model_that_reads_one_by_one_learns_alike_in_every_layout(task, hybrid, tmp_path):
    """Ranks whose rows have different numbers of sequences gather the weights equally often. One note says
    so."""
    alone = sft(task, hybrid, tmp_path / "alone", 1, "--ds.zero_stage 0")
    rows = "--train.dynamic_batch_enable --train.max_tokens_per_gpu 160 --model.gradient_checkpointing_enable"
    shared = sft(task, hybrid, tmp_path / "shared", 2, f"--ds.zero_stage 3 {rows}")
    for step in alone:
        for name in ("sft/loss", "grad_norm"):
            assert shared[step][name] == pytest.approx(alone[step][name], rel=2e-3), (step, name)
    assert alone[STEPS]["sft/loss"] < alone[1]["sft/loss"] - 0.5
    note = "Qwen3NextForCausalLM runs one sequence at a time"
    assert (tmp_path / "shared" / "log").read_text().count(note) == 1
