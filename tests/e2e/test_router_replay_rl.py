"""A mixture of experts in reinforcement learning: rounding in its routers widens the gap between sampler and
trainer, and replaying the sampler's choice closes it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from test_rl import COMMON, train

from openrlhf.observability.journal import read_journal
from openrlhf.tasks.prepare import TaskFiles

pytestmark = [pytest.mark.usefixtures("running_ray"), pytest.mark.slow]
FLAGS = (
    f"{COMMON.replace('fp32', 'bf16')} --algo.kl.init_coef 0.01 --actor.adam.lr 1e-4 --eval.steps -1 "
    "--train.colocate_all --vllm.enable_prefix_caching"
)
SHARDED = (
    "--actor.num_gpus_per_node 2 --vllm.num_engines 2 --ds.zero_stage 3 --train.dynamic_batch_enable "
    "--train.max_tokens_per_gpu 256 --actor.gradient_checkpointing_enable"
)


@pytest.fixture(scope="module")
def mixture(task: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    """Writes a model with eight experts in four layers, with random weights."""
    folder = tmp_path_factory.mktemp("moe")
    tokenizer = hf.AutoTokenizer.from_pretrained(task.model)
    config = hf.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # pyrefly: ignore[unexpected-keyword]
        num_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return replace(task, model=folder)


def test_replay_closes_the_gap(mixture: TaskFiles, tmp_path: Path) -> None:
    """In bfloat16 sampler and trainer round differently; with replay the gap is that of a dense model. The
    recorded choice travels with its tokens to the ranks and rows that read them, and is applied again where
    layers are recomputed."""
    (tmp_path / "own").mkdir()
    own = train(mixture, tmp_path / "own", f"{FLAGS} --actor.num_gpus_per_node 1")
    replayed = train(mixture, tmp_path, f"{FLAGS} --algo.router_replay {SHARDED}")
    for step in (1, 2):
        for name in ("abs_diff_p99", "abs_diff_max", "kl"):
            assert replayed[step][f"mismatch/{name}"] < 0.5 * own[step][f"mismatch/{name}"], (step, name)
        assert replayed[step]["mismatch/abs_diff_mean"] < own[step]["mismatch/abs_diff_mean"]


def test_answers_that_go_on_after_a_sync(mixture: TaskFiles, tmp_path: Path) -> None:
    """Paused engines read the tokens of their answers again, and report their experts once: with weights that
    do not move, sampler and trainer agree."""
    flags = FLAGS.replace("bf16", "fp32").replace("--actor.adam.lr 1e-4", "--actor.adam.lr 0")
    metrics = train(
        mixture,
        tmp_path,
        f"{flags} --actor.num_gpus_per_node 1 --algo.router_replay --train.async_enable "
        "--train.async_queue_size 2 --train.partial_rollout_enable --train.max_steps 4 "
        "--rollout.batch_size 2 --train.batch_size 8 --data.max_len 480 --rollout.max_new_tokens 400",
    )
    steps = [read_journal(tmp_path / "run" / "rollouts" / f"step_{step:06d}.parquet") for step in range(1, 5)]
    assert any(len(t.weight_versions) > 1 for step in steps for t in step)
    for step in metrics:
        assert metrics[step]["mismatch/abs_diff_max"] < 1e-4
