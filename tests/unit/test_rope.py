"""Frequencies that transformers chooses by the longest position of a row, against fixed ones."""

from pathlib import Path

import pytest
import torch
import transformers as hf

from openrlhf.models.loading import load_causal_lm, room_of
from openrlhf.models.policy import PolicyModel
from openrlhf.types import PackedRow, Sample

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ORIGINAL = 32
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS = {
    "phi3, longrope": hf.Phi3Config(
        **SHAPE,
        max_position_embeddings=128,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=LONG,
    ),
    "llama, dynamic": hf.LlamaConfig(**SHAPE, max_position_embeddings=ORIGINAL, rope_parameters=DYNAMIC),
    "gemma3, dynamic": hf.Gemma3TextConfig(
        **SHAPE,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=16,
        max_position_embeddings=ORIGINAL,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": DYNAMIC,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
MAX_LEN = 96


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("model")
    hf.AutoModelForCausalLM.from_config(MODELS[request.param]).save_pretrained(made)
    return made


def sample(length: int) -> Sample:
    ids = torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(length))
    return Sample(token_ids=ids, action_mask=torch.arange(length) > 0)


def log_probs(policy: PolicyModel, *samples: Sample) -> torch.Tensor:
    with torch.no_grad():
        return policy(PackedRow.of(samples)).log_probs


def transformers_log_probs(folder: Path, one: Sample) -> torch.Tensor:
    model = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        logits = model(one.token_ids[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, one.token_ids[1:, None])[:, 0]


def policy_of(folder: Path, max_len: int | None) -> PolicyModel:
    path = str(folder)
    return PolicyModel(
        load_causal_lm(path, flag="--m", dtype="fp32", attention="auto", max_len=max_len)
    ).eval()


@pytest.mark.parametrize("max_len", [None, ORIGINAL, MAX_LEN])
def test_a_neighbour_changes_nothing(folder, max_len):
    policy, short, long = policy_of(folder, max_len), sample(20), sample(60)
    alone = log_probs(policy, short)
    torch.testing.assert_close(log_probs(policy, short, long)[:19], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_probs(policy, short), alone, atol=0, rtol=0)


def test_frequencies_are_those_of_the_longest_sequence(folder):
    longest, short = sample(MAX_LEN), sample(20)
    expected = transformers_log_probs(folder, longest)
    torch.testing.assert_close(log_probs(policy_of(folder, MAX_LEN), longest), expected, atol=1e-4, rtol=1e-4)
    expected = transformers_log_probs(folder, short)
    torch.testing.assert_close(log_probs(policy_of(folder, 20), short), expected, atol=1e-4, rtol=1e-4)
    changed = log_probs(policy_of(folder, MAX_LEN), short) - expected
    assert changed.abs().max() > 0.01, "a hundred tolerances"


def yarn(factor: float) -> dict:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 100}


@pytest.mark.parametrize(
    ("config", "room"),
    [
        (hf.GPT2Config(n_positions=128), 128),
        (hf.BloomConfig(), None),  # a bias by distance, without a table of positions
        (hf.LlamaConfig(max_position_embeddings=128), 128),
        (hf.LlamaConfig(max_position_embeddings=128, rope_parameters=DYNAMIC), 512),
        (hf.LlamaConfig(max_position_embeddings=128, rope_parameters=DYNAMIC | {"rope_type": "linear"}), 512),
        (hf.Qwen3Config(max_position_embeddings=128, rope_parameters=yarn(4.0)), 400),
        (hf.Qwen3Config(max_position_embeddings=400, rope_parameters=yarn(4.0)), 400),
        (MODELS["phi3, longrope"], 128),
        (hf.Gemma3TextConfig(max_position_embeddings=128), 128),
        (hf.Gemma3Config(text_config=hf.Gemma3TextConfig(max_position_embeddings=128)), 128),
    ],
)
def test_how_long_a_sequence_a_model_reads(config: hf.PreTrainedConfig, room: int | None) -> None:
    assert room_of(config) == room
