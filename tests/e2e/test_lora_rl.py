"""Adapters in reinforcement learning: the engine samples with the adapters that the trainer computes with,
and the reference is the policy without them."""

from pathlib import Path

import numpy as np
import pytest
import test_async_rl
from safetensors.torch import load_file
from test_async_rl import AHEAD, PLACES, check_log_probs, steps_of
from test_rl import COMMON, check_samplers_hold_the_trained_weights, tokens_of, train

from openrlhf.observability.journal import read_journal
from openrlhf.tasks.prepare import TaskFiles

pytestmark = pytest.mark.usefixtures("running_ray")
FLAGS = (
    f"{COMMON.replace('group_norm', 'gae')} --algo.kl.init_coef 0.01 --actor.adam.lr 1e-2 "
    "--critic.adam.lr 1e-2 --ds.lora.rank 4 --ds.lora.alpha 8"
)
SHARED = "--ds.zero_stage 2 --actor.num_gpus_per_node 1 --train.colocate_all"


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    ["--ds.zero_stage 3 --actor.num_gpus_per_node 2 --critic.num_gpus_per_node 1", SHARED],
    ids=["zero 3, two ranks", "zero 2, colocated"],
)
def test_adapters_of_policy_and_critic(task: TaskFiles, tmp_path: Path, place: str) -> None:
    """Tokens are sampled from a part of the vocabulary, over which policy and reference are compared."""
    metrics = train(task, tmp_path, f"{FLAGS} {place} --rollout.top_p 0.9 --rollout.top_k 20")
    for step in (1, 2):
        assert metrics[step]["mismatch/abs_diff_max"] < 1e-4
        assert 1 < metrics[step]["rollout/kept_set_size_mean"] <= 20
        assert metrics[step]["critic/grad_norm"] > 0
    assert metrics[1]["kl/mean"] == pytest.approx(0, abs=1e-6)
    assert abs(metrics[2]["kl/mean"]) > 1e-5
    adapter = load_file(tmp_path / "policy" / "adapter_model.safetensors")
    assert adapter and all(".lora_" in name for name in adapter)
    assert any(weight.any() for name, weight in adapter.items() if ".lora_B." in name)
    check_samplers_hold_the_trained_weights(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "--ds.zero_stage 3 --actor.num_gpus_per_node 2 --critic.num_gpus_per_node 1",
        SHARED,
        "--train.backend torch --actor.num_gpus_per_node 2 --critic.num_gpus_per_node 1",
    ],
)
def test_adapters_that_engines_keep_apart(task: TaskFiles, tmp_path: Path, place: str) -> None:
    """Adapters that stay apart sample the same tokens as merged ones, and log-probs differ by their
    rounding."""
    adapters = f"{FLAGS} {place} --vllm.lora_sync adapter --vllm.enable_prefix_caching"
    train(task, tmp_path / "merged", f"{FLAGS} {place}")
    metrics = train(task, tmp_path / "apart", adapters)
    for step in (1, 2):
        assert metrics[step]["mismatch/abs_diff_max"] < 1e-4
        name = f"step_{step:06d}.parquet"
        merged, apart = (
            read_journal(tmp_path / run / "run" / "rollouts" / name) for run in ("merged", "apart")
        )
        assert tokens_of(merged) == tokens_of(apart)
        for one, other in zip(merged, apart, strict=True):
            assert one.weight_versions.tolist() == other.weight_versions.tolist()
            assert np.abs(one.rollout_log_probs - other.rollout_log_probs).max() < 1e-4
    assert abs(metrics[2]["kl/mean"]) > 1e-5  # the adapters change the policy
    check_samplers_hold_the_trained_weights(tmp_path / "apart")


@pytest.mark.slow
def test_a_request_goes_on_with_the_next_adapter(task: TaskFiles, tmp_path: Path) -> None:
    """Where syncs pause requests, every log-prob is that of the adapter which chose the token."""
    flags = (
        f"{test_async_rl.FLAGS} {PLACES['alone']} {AHEAD['pauses']} --ds.lora.rank 4 --actor.adam.lr 1e-2 "
        "--vllm.lora_sync adapter --ckpt.save_steps 1 --ckpt.save_hf --ckpt.disable_ds --ckpt.max_num 9"
    )
    train(task, tmp_path, flags)
    mixed = [t for step in steps_of(tmp_path) for t in step if len(t.weight_versions) > 1]
    assert mixed
    check_log_probs(task, tmp_path, mixed[:4])


@pytest.mark.slow
@pytest.mark.parametrize("lora_sync", ["merged", "adapter"])
def test_a_policy_of_four_bits(whole_blocks: TaskFiles, tmp_path: Path, lora_sync: str) -> None:
    """The engine holds the weights that the four bits stand for; in bf16 its products differ in the last of 8
    bits."""
    pytest.importorskip("bitsandbytes")
    flags = f"{FLAGS} {SHARED} --ds.load_in_4bit --vllm.lora_sync {lora_sync}"
    flags = flags.replace("param_dtype fp32", "param_dtype bf16")
    metrics = train(whole_blocks, tmp_path, flags)
    assert metrics[1]["kl/mean"] == pytest.approx(0, abs=1e-6)
    assert metrics[2]["mismatch/abs_diff_mean"] < 0.05
    assert all(t.ok for t in read_journal(tmp_path / "run" / "rollouts" / "step_000002.parquet"))


@pytest.mark.slow
def test_adapters_in_bf16_stay_apart_unless_merging_is_asked_for(task: TaskFiles, tmp_path: Path) -> None:
    """Merged into bf16, an adapter after one step of 1e-3 is rounded; apart, none of it is."""
    flags = f"{FLAGS} {SHARED}".replace("param_dtype fp32", "param_dtype bf16").replace("lr 1e-2", "lr 1e-3")
    metrics = train(task, tmp_path / "unset", flags)
    assert "lora_sync: adapter" in (tmp_path / "unset" / "run" / "config.yaml").read_text()
    assert "mismatch/merged_fraction" not in metrics[2]
    assert metrics[2]["mismatch/abs_diff_mean"] < 0.05
    merged = train(task, tmp_path / "merged", f"{flags} --vllm.lora_sync merged")
    assert 0 < merged[2]["mismatch/merged_fraction"] < 1
