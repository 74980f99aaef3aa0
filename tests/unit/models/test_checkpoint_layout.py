"""A weight sync sends the names, shapes and bits that `save_pretrained` writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ALL, tiny_config
from families import FAMILIES, tiny_family
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from openrlhf.models.checkpoint_layout import CheckpointLayout, checkpoint_tensors, forget_unused_conversions


def checkpoint_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Converts each weight of a checkpoint on its own, from nothing but its own tensors."""
    tensors = checkpoint_tensors(model)
    layout = CheckpointLayout(model, {name: tuple(t.shape) for name, t in tensors.items()})
    used = [name for c in layout.conversions for name in c.names]
    assert sorted(used) == sorted(tensors)
    found = {}
    for conversion in layout.conversions:
        found |= layout.convert(conversion, {name: tensors[name] for name in conversion.names})
    return found


QUICK = ("Qwen3", "Mixtral", "Ernie4_5_Moe", "Glm4Moe", "GPTNeoX")


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES]
)
def test_a_sync_sends_what_a_checkpoint_holds(tmp_path: Path, family: str) -> None:
    disk = load_file(tiny_family(tmp_path, family) / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    forget_unused_conversions(model)
    sent = checkpoint_of(model)
    assert sent.keys() == disk.keys()
    assert all(torch.equal(sent[name], disk[name]) for name in disk)

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    announced = checkpoint_of(empty)
    assert {n: (t.shape, t.dtype) for n, t in announced.items()} == {
        n: (t.shape, t.dtype) for n, t in disk.items()
    }


def test_names_by_hand(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_family(tmp_path, "Mixtral"), dtype=torch.float32)
    fused, sent = dict(model.named_parameters()), checkpoint_of(model)
    experts = fused["model.layers.1.mlp.experts.gate_up_proj"]  # (expert, gate and up, hidden)
    expert = "model.layers.1.block_sparse_moe.experts.2"
    assert torch.equal(sent[f"{expert}.w1.weight"], experts[2, :64])
    assert torch.equal(sent[f"{expert}.w3.weight"], experts[2, 64:])
    assert torch.equal(sent[f"{expert}.w2.weight"], fused["model.layers.1.mlp.experts.down_proj"][2])
    # tensors that keep their layout are not copied
    embedding = "model.embed_tokens.weight"
    assert sent[embedding].data_ptr() == fused[embedding].data_ptr()


def test_a_head_with_weights_of_its_own_is_sent_whatever_the_configuration_says() -> None:
    config = tiny_config("qwen3")
    config.tie_word_embeddings = True
    model: Any = AutoModelForCausalLM.from_config(config)
    sent = checkpoint_tensors(model)
    assert "lm_head.weight" not in sent
    model._modules = {"lm_head": model.lm_head, "model": model.model}
    assert checkpoint_tensors(model).keys() == sent.keys()  # whichever of the two comes first
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert checkpoint_tensors(model)["lm_head.weight"] is model.lm_head.weight


def test_what_a_checkpoint_did_not_need_is_not_turned_back(tmp_path: Path) -> None:
    """Under ZeRO-3 transformers remembers every conversion there is, as if all had been used."""
    disk = load_file(tiny_family(tmp_path, "GPTNeoX") / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model._weight_conversions.append(WeightRenaming("of_another_age", "layers"))
    assert any("of_another_age" in name for name in checkpoint_of(model))
    forget_unused_conversions(model)
    assert checkpoint_of(model).keys() == disk.keys()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ALL)
def test_every_causal_architecture(model_type: str) -> None:
    """Names and shapes are compared, of models on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    state = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    assert {n: tuple(t.shape) for n, t in checkpoint_of(model).items()} == {
        n: tuple(t.shape) for n, t in state.items()
    }
