"""A model in training equals itself in evaluation, although its architecture has every kind of noise."""

import copy

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from openrlhf.config.sections import DeepSpeedConfig, LoraConfig
from openrlhf.models import dropout
from openrlhf.models.dropout import enable_checkpointing, has_noise, set_training
from openrlhf.models.lora import disabled_adapters, prepare_for_training

SIZE = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
MOE = SIZE | {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4}
GPT2_SIZE = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
CONFIGS = {
    "opt, skipped layers": hf.OPTConfig(
        **SIZE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64
    ),
    "xglm": hf.XGLMConfig(vocab_size=61, d_model=32, ffn_dim=48, num_layers=3, attention_heads=4),
    "biogpt": hf.BioGptConfig(**SIZE, intermediate_size=48),
    "falcon, read off the configuration": hf.FalconConfig(**SIZE, alibi=False),
    "gpt-j, read off the configuration": hf.GPTJConfig(**GPT2_SIZE, rotary_dim=4),
    "gpt-2": hf.GPT2Config(**GPT2_SIZE),
    "bloom": hf.BloomConfig(vocab_size=61, hidden_size=32, n_layer=3, n_head=4),
    "qwen3": hf.Qwen3Config(**SIZE, intermediate_size=48, num_key_value_heads=2, head_dim=8),
    "mixtral, noise before routers": hf.MixtralConfig(**MOE),
    "phimoe, drawn experts": hf.PhimoeConfig(**MOE),
}


def model_of(name: str) -> hf.PreTrainedModel:
    config = copy.deepcopy(CONFIGS[name])
    for field, value in config.to_dict().items():
        if ("drop" in field or "jitter" in field) and isinstance(value, float):
            setattr(config, field, 0.5)
    assert has_noise(config)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for parameter in model.parameters():  # untrained attention is too even for its dropout to show
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def answer(model: hf.PreTrainedModel) -> Tensor:
    ids = torch.arange(3, 33).reshape(2, 15)
    return model(input_ids=ids, use_cache=False).logits


def gradients(model: hf.PreTrainedModel, logits: Tensor) -> list[Tensor]:
    model.zero_grad()
    logits.logsumexp(-1).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", CONFIGS)
def test_training_computes_what_evaluation_does(name):
    model = model_of(name)
    expected = answer(model.eval())
    set_training(model, dropout=True)
    assert not torch.allclose(answer(model), expected, atol=1e-2), "there is no noise to switch off"
    set_training(model, dropout=False)
    assert torch.equal(answer(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["opt, skipped layers", "qwen3", "phimoe, drawn experts"])
def test_layers_that_are_computed_again_compute_the_same(name, reentrant):
    model = model_of(name)
    expected = answer(model.eval())
    expected_gradients = gradients(model, expected)
    if reentrant:
        model.enable_input_require_grads()
    enable_checkpointing(model, reentrant=reentrant, dropout=False)
    set_training(model, dropout=False)
    calls = []
    layer = next(m for m in model.modules() if type(m).__name__.endswith("DecoderLayer"))
    layer.register_forward_pre_hook(lambda layer, args: calls.append(layer.training))
    found = answer(model)
    assert torch.equal(found, expected)
    for one, other in zip(gradients(model, found), expected_gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert calls == [False, False], "once in the forward pass, and once more in the backward pass"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "opt, skipped layers"])
def test_inputs_of_layers_wait_in_host_memory(name, reentrant, monkeypatch):
    """Only the inputs go to host memory: one hidden state for each layer goes there and comes back, and
    nothing else changes."""
    model = model_of(name)
    if reentrant:
        model.enable_input_require_grads()
    there: list[Tensor] = []
    back: list[Tensor] = []

    def leave(x: Tensor) -> int:
        there.append(x.detach().clone())
        return len(there) - 1

    def come_back(place: int) -> Tensor:
        back.append(there[place])
        return there[place]

    monkeypatch.setattr(dropout, "save_on_cpu", lambda **_: saved_tensors_hooks(leave, come_back))
    enable_checkpointing(model, reentrant=reentrant, dropout=False)
    set_training(model, dropout=False)
    expected = gradients(model, answer(model))
    assert not there
    enable_checkpointing(model, reentrant=reentrant, dropout=False, on_host=True)
    set_training(model, dropout=False)
    found = gradients(model, answer(model))
    assert [x.shape for x in there] == [(2, 15, 32)] * 3 and len(back) == 3
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_only_adapters_drop_what_their_own_flag_says():
    """An adapter begins as nothing, because adapters start as 0. The reference below them never drops
    anything."""
    model = model_of("opt, skipped layers")
    expected = answer(model.eval()).detach()
    prepare_for_training(model, DeepSpeedConfig(lora=LoraConfig(rank=4, dropout=0.5)))
    set_training(model, dropout=False)
    assert torch.equal(answer(model), expected)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1
    first, second = answer(model), answer(model)
    assert not torch.allclose(first, second, atol=1e-2)
    with torch.no_grad(), disabled_adapters(model):
        assert torch.equal(answer(model), expected)
    assert torch.equal(answer(model.eval()), answer(model))


@pytest.mark.parametrize(
    ("config", "noisy"),
    [
        (hf.Qwen3Config(), False),
        (hf.Qwen3Config(attention_dropout=0.1), True),
        (hf.GPT2Config(), True),
        (hf.PhimoeConfig(router_jitter_noise=0.0), True),
        (hf.xLSTMConfig(), False),  # in evaluation it computes long rows without gradients
        (hf.RwkvConfig(), False),  # in evaluation it rescales its weights in place
        (hf.Gemma3Config(text_config={"attention_dropout": 0.1}), True),
    ],
)
def test_which_models_have_noise(config, noisy):
    assert has_noise(config) == noisy
