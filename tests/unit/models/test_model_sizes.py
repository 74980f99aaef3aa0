"""A model has one size: its configuration, its loaded weights, and a pass of it agree."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from architectures import ALL, tiny_config
from counted_work import Work

from openrlhf.config.sections import DeepSpeedConfig, LoraConfig
from openrlhf.memory.engines import bucket_size
from openrlhf.memory.sizes import ModelShape
from openrlhf.memory.training import gathered_bytes, training_memory
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import ScoreModel, load_scorer
from openrlhf.models.sizes import ModelSize, model_size, shape_of
from openrlhf.models.vision import freeze_vision
from openrlhf.rows import PackedRow, Sample
from openrlhf.tasks.tiny_vision_model import tiny_vision_model

FLAG = "--model"
OPTIONS: dict[str, Any] = {"flag": FLAG, "dtype": "bf16", "attention": "auto"}
TOKENS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a vocabulary so large that its head needs more memory than all layers."""
    config = hf.LlamaConfig(
        vocab_size=20_000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    path = tmp_path_factory.mktemp("model")
    hf.LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def ds(**flags: Any) -> DeepSpeedConfig:
    return DeepSpeedConfig(param_dtype="bf16", **flags)


def planned(size: ModelSize, flags: DeepSpeedConfig) -> ModelShape:
    return size.on_rank(flags, "deepspeed", trained=True)


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("targets", [None, ("all-linear",), ("q_proj", "self_attn.v_proj")])
def test_a_configuration_says_what_its_weights_are(folder, scalar, targets):
    flags = ds(lora=LoraConfig(rank=4, target_modules=targets)) if targets else ds()
    size = model_size(folder, FLAG, adapted=flags.lora.target_modules)
    load = (
        (lambda: load_scorer(folder, **OPTIONS).model)
        if scalar
        else (lambda: load_causal_lm(folder, **OPTIONS))
    )
    loaded = shape_of(prepare_for_training(load(), flags))
    assert planned(size.scorer() if scalar else size, flags) == loaded


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_with_a_vision_tower(tmp_path: Path, frozen: bool) -> None:
    tiny_vision_model(tmp_path / "model", seed=3)
    path = str(tmp_path / "model")
    size = model_size(path, FLAG, images=True, frozen_vision=frozen)
    model = load_causal_lm(path, **OPTIONS, images=True)
    whole = shape_of(model).trainable
    if frozen:
        freeze_vision(model)
    assert planned(size, ds()) == shape_of(model)
    assert (size.trainable < whole == size.parameters) == frozen


@pytest.mark.parametrize("name", ALL)
@pytest.mark.few(40)
def test_a_language_model_has_a_head_over_its_vocabulary(name: str) -> None:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(tiny_config(name))
    assert shape_of(model).vocabulary == 61


def test_four_bits_with_their_scales(folder: str) -> None:
    flags = ds(load_in_4bit=True)
    model = load_causal_lm(folder, **OPTIONS, in_4bit=True)
    states = [p.quant_state for p in model.parameters() if hasattr(p, "quant_state")]
    held = sum(p.nbytes for p in model.parameters())
    held += sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
    assert len(states) == 2 * 7
    assert shape_of(model).weight_bytes == planned(model_size(folder, FLAG), flags).weight_bytes
    assert shape_of(model).weight_bytes == pytest.approx(held, rel=1e-4)


@pytest.mark.parametrize("scalar", [False, True])
def test_the_peak_of_a_pass(folder: str, scalar: bool) -> None:
    """A scalar head has no logits over the vocabulary, which would be most of this pass. The embedding learns
    nothing here, because its gradient comes when the activations are gone."""
    options = OPTIONS | {"dtype": "fp32"}
    model = load_scorer(folder, **options) if scalar else PolicyModel(load_causal_lm(folder, **options))
    model.model.get_input_embeddings().requires_grad_(False)
    sample = Sample(token_ids=torch.arange(TOKENS), action_mask=torch.arange(TOKENS) > 0)
    with Work() as work:
        found = model.train()(PackedRow.of([sample]))
        (found if isinstance(model, ScoreModel) else found.log_probs).sum().backward()
    flags = DeepSpeedConfig(param_dtype="fp32", zero_stage=0)
    said = training_memory(shape_of(model.model), flags, "deepspeed", TOKENS, False)
    head = 0 if scalar else 4 * 20_000 * 64  # its gradient is counted with the logits, too
    assert work.peak == pytest.approx(said.gradients - head + said.activations + said.logits, rel=0.15)


def test_a_tensor_parallel_rank_has_a_part_of_heads_and_vocabulary(folder: str) -> None:
    size = model_size(folder, FLAG)
    whole, half = planned(size, ds()), planned(size, ds(tensor_parallel_size=2))
    parts = ("weight_bytes", "trainable", "vocabulary", "intermediate", "queries", "keys")
    assert half == replace(whole, **{name: getattr(whole, name) // 2 for name in parts})
    assert planned(size, ds(tensor_parallel_size=3)).vocabulary == 20_000


def test_frozen_weights_are_gathered_too(folder: str) -> None:
    """Two of two layers: with adapters alone, a pass gathers as many weights as in full training."""
    size, flags = model_size(folder, FLAG), ds(zero_stage=3)
    full = gathered_bytes(size.on_rank(flags, "torch", trained=True), flags, "torch", trained=True)
    adapted = ds(zero_stage=3, lora=LoraConfig(rank=1))
    lora = gathered_bytes(size.on_rank(adapted, "torch", trained=True), adapted, "torch", trained=True)
    frozen = gathered_bytes(size.on_rank(flags, "torch", trained=False), flags, "torch", trained=False)
    assert full == frozen == 2 * size.parameters <= lora == 2 * (size.parameters + size.adapted)


def test_a_bucket_holds_the_largest_tensor() -> None:
    assert bucket_size(10, 50, 20) == bucket_size(20, 50, 20) == 20
    assert bucket_size(30, 50, 20) == 30
    assert bucket_size(5, 8, 20) == 8
