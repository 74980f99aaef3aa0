"""What an optimizer is told of each parameter."""

import pytest
import torch
import transformers as hf

from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, OptimConfig
from openrlhf.engine.deepspeed_engine import _optimizer
from openrlhf.models.backbone import RowModel

SIZE = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
KEY_VALUE = SIZE | {"intermediate_size": 48, "num_key_value_heads": 2}
CONFIGS = {
    "gpt-2, whose norms are called ln": hf.GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4),
    "cohere, whose norms of heads are matrices": hf.CohereConfig(**KEY_VALUE, use_qk_norm=True),
    "gpt-oss, with vectors and biases of experts": hf.GptOssConfig(**KEY_VALUE, num_local_experts=2),
}
DECAYED = {
    "gpt-2, whose norms are called ln": {"wte", "wpe", "c_attn", "c_proj", "c_fc"},
    "cohere, whose norms of heads are matrices": {
        *("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    },
    "gpt-oss, with vectors and biases of experts": {
        *("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "router", "lm_head", "experts"),
    },
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_decays(name, sharded):
    module = RowModel(hf.AutoModelForCausalLM.from_config(CONFIGS[name]))
    if sharded:  # as ZeRO-3 leaves them
        for parameter in module.parameters():
            parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    optim = OptimConfig(adam=AdamConfig(weight_decay=0.1))
    decayed, others = _optimizer(module, optim, DeepSpeedConfig()).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in module.named_parameters()}
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert {names[id(p)].split(".")[-2] for p in decayed["params"]} == DECAYED[name]
    assert not [n for p in decayed["params"] if (n := names[id(p)]).endswith("bias")]
