"""Before its first step the policy equals the sampler's policy and its own reference."""

import math
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig

PLAIN = {"stage": 0, "rank": 0, "checkpointing": False, "dropout": False}
CASES = {
    "plain": PLAIN,
    "sharded, computed again": PLAIN | {"stage": 3, "checkpointing": True},
    "adapters with dropout": PLAIN | {"rank": 4},
}
ASKED_FOR = {"dropout that is asked for": PLAIN | {"dropout": True}}


def test_the_ratio_is_one_whatever_dropout_the_model_has(tmp_path, run_worker: Callable[..., list[dict]]):
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=61,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.5,
        attention_dropout=0.5,
        layerdrop=0.5,
        init_std=0.15,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (report,) = run_worker("first_step", 1, model=str(tmp_path / "model"), cases=CASES | ASKED_FOR)
    for name in CASES:
        dpo, ppo = report[name]["dpo"], report[name]["ppo"]
        assert dpo["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6), name
        assert dpo["dpo/chosen_reward"] == pytest.approx(0, abs=1e-5), name
        assert ppo["policy/ppo_kl"] == pytest.approx(0, abs=1e-6), name
        assert ppo["policy/clip_fraction"] == 0, name
    (asked_for,) = (report[name] for name in ASKED_FOR)
    assert abs(asked_for["dpo"]["dpo/loss"] - math.log(2)) > 1e-4
    assert asked_for["ppo"]["policy/clip_fraction"] > 0.1
