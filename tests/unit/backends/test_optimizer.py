"""Settings of an optimizer for each parameter, and its number of threads beside a GPU."""

from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from openrlhf.backends import distributed
from openrlhf.backends.deepspeed.engine import _optimizer
from openrlhf.cluster import actors
from openrlhf.config.sections import AdamConfig, OptimConfig
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
        *("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    },
    "gpt-oss, with vectors and biases of experts": {
        *("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "router", "lm_head", "experts")
    },
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_decays(name, sharded):
    module = RowModel(hf.AutoModelForCausalLM.from_config(CONFIGS[name]))
    if sharded:  # the shape that ZeRO-3 leaves
        for parameter in module.parameters():
            parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    optim = OptimConfig(adam=AdamConfig(weight_decay=0.1))
    decayed, others = _optimizer(module, optim).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in module.named_parameters()}
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert {names[id(p)].split(".")[-2] for p in decayed["params"]} == DECAYED[name]
    assert not [n for p in decayed["params"] if (n := names[id(p)]).endswith("bias")]


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}, 8),  # torchrun and Ray set these
        ({}, 16),  # one rank for each GPU of the machine
        ({"OMP_NUM_THREADS": "5", "LOCAL_WORLD_SIZE": "8"}, None),
        ({"LOCAL_WORLD_SIZE": "100"}, 1),
    ],
)
def test_optimizer_steps_on_the_cpu_have_a_share_of_its_cores(monkeypatch, environment, threads):
    said: list[int] = []
    monkeypatch.setattr(distributed, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(distributed.os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", said.append)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    distributed.use_own_cores()
    assert said == ([] if threads is None else [threads])


def test_ranks_of_a_node_are_as_many_as_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray lets each rank see only its own GPU."""
    nodes = [{"NodeID": "a", "Resources": {"CPU": 8.0}}, {"NodeID": "b", "Resources": {"GPU": 4.0}}]
    context = SimpleNamespace(get_node_id=lambda: "b")
    monkeypatch.setattr(actors.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(actors.ray, "get_runtime_context", lambda: context)
    assert actors.gpus_of_node() == 4
