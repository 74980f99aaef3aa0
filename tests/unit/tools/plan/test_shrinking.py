"""Models that `openrlhf rehearse` shrinks: same architecture and vocabulary, few weights, finite outputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from refusals import refused
from safetensors.torch import load_file

from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.tasks.tiny_vision_model import tiny_vision_tokenizer, tiny_vision_weights
from openrlhf.tools.plan.rehearsal.shrinking import _shrink_text, shrunk_config, shrunk_model

FLAG = "--model.model_name_or_path"
HEADS: dict[str, Any] = {"head_dim": 128}
CONFIGS: dict[str, Any] = {
    "llama": hf.LlamaConfig(
        vocab_size=999,
        num_key_value_heads=8,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen2": hf.Qwen2Config(vocab_size=999, hidden_size=3584, num_attention_heads=28, num_key_value_heads=4),
    "qwen3": hf.Qwen3Config(
        vocab_size=999, hidden_size=2560, num_key_value_heads=8, tie_word_embeddings=True
    ),
    "gemma3": hf.Gemma3TextConfig(
        vocab_size=999, num_attention_heads=4, num_key_value_heads=1, sliding_window=512
    ),
    "moe": hf.Qwen3MoeConfig(vocab_size=999, **HEADS),
    "latent": hf.DeepseekV3Config(vocab_size=999),
    "gpt2": hf.GPT2Config(vocab_size=999),
}
"""Configurations with the sizes of large models, which are mostly transformers' defaults."""


@pytest.mark.parametrize("name", CONFIGS)
def test_shrunk_models_load_and_answer(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    CONFIGS[name].save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    folder = shrunk_model(str(source), FLAG, tmp_path / "small", seed=0, scores=False)
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == CONFIGS[name].model_type and model.config.vocab_size == 999
    assert model.dtype == torch.float32 and sum(p.numel() for p in model.parameters()) < 3_000_000
    logits = model(torch.arange(1, 80)[None]).logits
    assert logits.isfinite().all() and float(logits.detach().std()) > 1e-3
    assert hf.AutoTokenizer.from_pretrained(folder).get_vocab() == tiny_tokenizer().get_vocab()


def test_proportions_are_kept() -> None:
    small = {name: shrunk_config(config) for name, config in CONFIGS.items()}
    for name in ("llama", "qwen3", "moe", "gemma3"):
        before, after = CONFIGS[name], small[name]
        ratios = [c.num_attention_heads // c.num_key_value_heads for c in (before, after)]
        assert ratios[0] == ratios[1], name
    assert small["qwen2"].hidden_size == small["qwen2"].num_attention_heads * 32
    assert small["llama"].rope_parameters == CONFIGS["llama"].rope_parameters
    assert small["qwen3"].tie_word_embeddings
    assert small["gemma3"].layer_types == ["sliding_attention", "full_attention"]
    assert small["gemma3"].sliding_window == 32
    assert (small["moe"].num_experts, small["moe"].num_experts_per_tok) == (4, 2)
    assert (small["latent"].num_hidden_layers, small["latent"].first_k_dense_replace) == (2, 1)


def test_sizes_of_each_layer_are_shrunk_too() -> None:
    """Gemma 3n lists the inner size of each layer."""
    values = {"num_hidden_layers": 3, "intermediate_size": [8192, 8192, 4096], "num_attention_heads": 8}
    values |= {"hidden_size": 2048, "num_key_value_heads": 2}
    _shrink_text(values)
    assert values["intermediate_size"] == [128] * values["num_hidden_layers"]


def test_a_model_that_reads_images(tmp_path: Path) -> None:
    tokenizer = tiny_vision_tokenizer()
    source = tmp_path / "source"
    values = tiny_vision_weights(tokenizer).config.to_dict()
    del values["text_config"]["layer_types"]
    values["text_config"] |= {"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28}
    values["text_config"] |= {"num_key_value_heads": 4}
    values["text_config"]["rope_parameters"]["mrope_section"] = [16, 24, 24]
    values["vision_config"] |= {"depth": 32, "hidden_size": 1280, "num_heads": 16, "out_hidden_size": 3584}
    values["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    hf.Qwen2_5_VLConfig.from_dict(values).save_pretrained(source)
    tokenizer.save_pretrained(source)
    folder = shrunk_model(str(source), FLAG, tmp_path / "small", seed=0, scores=False)
    model = hf.AutoModelForImageTextToText.from_pretrained(folder)
    assert model.config.text_config.num_hidden_layers == model.config.vision_config.depth == 2
    assert model.config.vision_config.out_hidden_size == model.config.text_config.hidden_size
    assert model(torch.arange(5, 20)[None]).logits.isfinite().all()


@pytest.mark.parametrize("head", ["score", "value_head"])
def test_a_reward_model_has_a_scalar_head(head: str, tmp_path: Path) -> None:
    config = hf.Qwen3Config(**CONFIGS["qwen3"].to_diff_dict())
    config.save_pretrained(tmp_path / "source")
    path, small = str(tmp_path / "source"), tmp_path / "small"
    weights = load_file(shrunk_model(path, FLAG, small, seed=0, scores=True, head=head) / "model.safetensors")
    assert weights[f"{head}.weight"].shape == (1, 64)


def test_weights_follow_from_the_seed(tmp_path: Path) -> None:
    CONFIGS["qwen3"].save_pretrained(tmp_path / "source")
    made = [
        load_file(
            shrunk_model(str(tmp_path / "source"), FLAG, tmp_path / str(i), seed=seed, scores=False)
            / "model.safetensors"
        )["model.embed_tokens.weight"]
        for i, seed in enumerate((0, 0, 1))
    ]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_an_architecture_that_cannot_be_shrunk(tmp_path: Path) -> None:
    hf.MambaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path / "source")
    with refused(ErrorCode.UNSUPPORTED, flag=FLAG, value=str(tmp_path / "source")):
        shrunk_model(str(tmp_path / "source"), FLAG, tmp_path / "small", seed=0, scores=False)
