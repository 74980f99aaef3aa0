from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused
from transformers import (
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from openrlhf.backends.vllm import support
from openrlhf.backends.vllm.support import check_vllm_adapts, check_vllm_runs
from openrlhf.config.fields import with_values
from openrlhf.config.ppo import ActorConfig, PPOConfig, VllmConfig
from openrlhf.config.sections import LoraConfig
from openrlhf.errors import ErrorCode
from openrlhf.loop.machines import adapts_apart, resolve
from openrlhf.loop.rl_checks import check_engines

CPU_KERNELS = "gdn.qwen_gdn_linear_attn"
"""Module of vLLM whose CPU kernels for linear attention support only bf16."""


def llama(**changes):
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "architectures": ["LlamaForCausalLM"]}
    return LlamaConfig(**(sizes | changes))


def check(config, **changes):
    options = {"dtype": "fp32", "max_len": 128, "on_cpu": True} | changes
    check_vllm_runs(config, flag="--flag", path="tiny", **options)


@pytest.mark.processes
def test_the_tables_are_those_of_vllm():
    from vllm.config import model
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == support.CPU_HEAD_SIZES
    assert set(support.FLOAT16_UNSTABLE) == set(model._FLOAT16_NOT_SUPPORTED_MODELS)
    folder = Path(model.__file__).parents[1] / "model_executor" / "models"
    files = {
        name for name, text in ((f.name, f.read_text()) for f in folder.glob("*.py")) if CPU_KERNELS in text
    }
    assert files == {"qwen3_next.py", "qwen3_5.py", "interns2_mobius.py"}


@pytest.mark.parametrize("config", [llama(num_attention_heads=8), llama(head_dim=8)])
def test_a_head_size_without_a_kernel(config):
    with refused(ErrorCode.UNSUPPORTED, flag="--flag", value="tiny", told=("size 8;", "32, 64, 80")):
        check(config)
    check(config, on_cpu=False)


def test_a_run_of_rl_asks_once_it_is_known_that_there_are_no_gpus(tmp_path):
    llama(num_attention_heads=8).save_pretrained(tmp_path)
    config = PPOConfig(actor=ActorConfig(model_name_or_path=str(tmp_path)))
    check_engines(config, on_cpu=False)
    with refused(ErrorCode.UNSUPPORTED, flag="--actor.model_name_or_path", value=tmp_path):
        check_engines(config, on_cpu=True)


def test_heads_that_do_not_divide():
    with refused(ErrorCode.UNSUPPORTED, told=("--vllm.tensor_parallel_size 5", "1, 2, 3, 4, 6, 12.")):
        check(llama(hidden_size=384, num_attention_heads=12), tensor_parallel_size=5)


def stretched(kind, limit):
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    return llama(max_position_embeddings=limit, rope_parameters=rope)


@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
def test_a_rope_that_vllm_does_not_stretch(kind):
    check(stretched(kind, 128))
    with refused(ErrorCode.UNSUPPORTED, told=(f"RoPE of type {kind}", "512 tokens")):
        check(stretched(kind, 128), max_len=512)
    check(stretched(kind, 512), max_len=512)
    check(stretched("linear", 128), max_len=512)


def test_a_model_that_is_unstable_in_half_precision():
    gemma = Gemma2Config(architectures=["Gemma2ForCausalLM"])
    with refused(ErrorCode.UNSUPPORTED, told="--ds.param_dtype bf16"):
        check(gemma, dtype="fp16")
    check(gemma, dtype="bf16")


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"])
def test_linear_attention_on_a_cpu(architecture):
    config = Qwen3NextConfig(architectures=[architecture], head_dim=128)
    with refused(ErrorCode.UNSUPPORTED, told="--ds.param_dtype bf16"):
        check(config, dtype="fp32")
    check(config, dtype="bf16")
    check(config, dtype="fp32", on_cpu=False)


@pytest.mark.parametrize(
    "config",
    [
        llama(),
        llama(architectures=["OfMyOwnForCausalLM"], auto_map={"AutoModelForCausalLM": "own.Own"}),
        llama(architectures=None),
        DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], qk_rope_head_dim=8),
        MambaConfig(architectures=["MambaForCausalLM"]),
    ],
)
def test_an_architecture_is_left_to_vllm(config):
    check(config)


def test_a_model_without_layers_for_adapters(tmp_path):
    """Falcon's class supports none; GPT-NeoX is read by transformers, which only vLLM can tell."""
    options = {"flag": "--flag", "path": "tiny"}
    for config in (llama(), Qwen3Config(architectures=["Qwen3ForCausalLM"])):
        check_vllm_adapts(config, **options)
    check_vllm_adapts(GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"]), **options)
    falcon = FalconConfig(architectures=["FalconForCausalLM"])
    lora_sync = {"flag": "--vllm.lora_sync", "value": "adapter"}
    with refused(ErrorCode.UNSUPPORTED, **lora_sync):
        check_vllm_adapts(falcon, **options)
    falcon.save_pretrained(tmp_path)
    config = PPOConfig(actor=ActorConfig(model_name_or_path=str(tmp_path)))
    check_engines(config, on_cpu=False)
    adapted = replace(config, ds=replace(config.ds, lora=LoraConfig(rank=8)))
    check_engines(adapted, on_cpu=False)
    with refused(ErrorCode.UNSUPPORTED, **lora_sync, told=f"(--actor.model_name_or_path {tmp_path})"):
        check_engines(replace(adapted, vllm=VllmConfig(lora_sync="adapter")), on_cpu=False)


@pytest.mark.parametrize(
    ("model", "values", "apart"),
    [
        (llama(), {}, True),
        (llama(), {"ds.param_dtype": "fp16", "ds.lora.rank": 512}, True),
        (llama(), {"ds.param_dtype": "fp32"}, False),
        (llama(), {"ds.lora.rank": 0}, False),
        (llama(), {"ds.lora.rank": 513}, False),
        (llama(), {"rollout.engine": "transformers"}, False),
        (llama(), {"data.max_images_per_prompt": 1}, False),
        (llama(), {"vllm.speculative": "ngram:3"}, False),
        (Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"]), {}, False),
        (FalconConfig(architectures=["FalconForCausalLM"]), {}, False),
        (GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"]), {}, False),
        (llama(), {"actor.model_name_or_path": "no/folder/here"}, False),
    ],
)
def test_engines_get_adapters_apart_where_merging_rounds_and_vllm_can(model, values, apart, tmp_path):
    model.save_pretrained(tmp_path)
    defaults = {"actor.model_name_or_path": str(tmp_path), "ds.lora.rank": 8}
    config = with_values(PPOConfig(), defaults | values)
    assert adapts_apart(config) is apart
    placement = {f"{role}.num_gpus_per_node" for role in config.own_placements}
    assert resolve(config, placement) == ({"vllm.lora_sync": "adapter"} if apart else {})
    assert resolve(config, {*placement, "vllm.lora_sync"}) == {}
