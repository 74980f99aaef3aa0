"""Packages that flags need are looked for before anything starts."""

import pytest
from command_lines import problems_of

from openrlhf.config.commands import BATCH_INFERENCE, CHAT, DPO, KD, KTO, PPO, PRM, RM, SERVE_RM, SFT


@pytest.mark.parametrize("command", [SFT, RM, PRM, DPO, KTO, KD, PPO])
def test_without_deepspeed(command, say, installed):
    installed.remove("deepspeed")
    _, lines = say(command, "")
    assert problems_of(lines) == [("missing-package", "--train.backend deepspeed (default)")]
    assert 'pip install "openrlhf[deepspeed]"' in lines[0] and "--train.backend torch" in lines[0]
    assert say(command, "--train.backend torch --ds.zero_stage 2")[0] is not None


def test_rl_without_vllm(say, installed):
    installed.remove("vllm")
    _, lines = say(PPO, "")
    assert problems_of(lines) == [("missing-package", "--rollout.engine vllm (default)")]
    install = 'pip install "openrlhf[gpu]" ("openrlhf[cpu]" without a GPU)'
    assert install in lines[0] and "--rollout.engine transformers" in lines[0]
    assert say(PPO, "--rollout.engine transformers")[0] is not None


@pytest.mark.parametrize("command", [SFT, PPO])
def test_packages_are_looked_for_before_anything_starts(command, say, monkeypatch, installed):
    installed.add("flash_attn")
    _, lines = say(command, "--flash_attn --ds.param_dtype fp32 --use_wandb True")
    assert problems_of(lines) == [
        ("conflict", "--ds.attn_implementation flash_attention_2"),
        ("missing-package", "--logger.wandb.key"),
    ]
    told = "\n".join(lines)
    assert 'pip install "openrlhf[wandb]"' in told and "WANDB_MODE=disabled" in told
    monkeypatch.setenv("WANDB_MODE", "disabled")
    config, lines = say(command, "--logger.wandb.key True")
    assert not config.logger.wandb.is_used
    assert any(line.startswith("note: --logger.wandb.key: ") and "WANDB_MODE" in line for line in lines)
    monkeypatch.delenv("WANDB_MODE")
    installed.add("wandb")
    assert say(command, "--flash_attn --use_wandb True")[0] is not None
    installed.remove("flash_attn")
    _, lines = say(command, "--flash_attn --ds.param_dtype fp32")
    assert any("package flash_attn" in line and line.startswith("note: ") for line in lines)
    assert not problems_of(lines)


@pytest.mark.parametrize("command", [SFT, PPO, SERVE_RM, BATCH_INFERENCE, CHAT])
def test_kernels_of_the_hub(command, say, installed):
    line = "--ds.attn_implementation kernels-community/flash-attn2"
    _, lines = say(command, line)
    assert problems_of(lines) == [("missing-package", line)] and '"openrlhf[kernels]"' in lines[0]
    installed.add("kernels")
    assert say(command, line)[0] is not None


@pytest.mark.parametrize("command", [SFT, RM, PPO])
def test_modelscope(command, say, installed):
    _, lines = say(command, "--use_ms")
    assert problems_of(lines) == [("missing-package", "--use_ms")] and '"openrlhf[modelscope]"' in lines[0]
    installed.add("modelscope")
    assert say(command, "--use_ms")[0].use_ms


@pytest.mark.parametrize("command", [SFT, RM, PPO])
def test_liger_kernels(command, say, installed):
    _, lines = say(command, "--use_liger_kernel")
    assert problems_of(lines) == [("missing-package", "--ds.use_liger_kernel")]
    assert any('"openrlhf[liger]"' in line for line in lines)
    installed.add("liger_kernel")
    assert say(command, "--use_liger_kernel")[0].ds.use_liger_kernel
    found = problems_of(say(command, "--use_liger_kernel --ds.experts_implementation grouped_mm")[1])
    assert found == [("conflict", "--ds.experts_implementation grouped_mm")]
