from dataclasses import replace

import pytest
from transformers import (
    CodeGenConfig,
    CTRLConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from openrlhf.backends.vllm.support import (
    check_vllm_adapts,
    check_vllm_runs,
    cpu_head_sizes,
    registered_architectures,
)
from openrlhf.cli.rl_checks import check_engines
from openrlhf.config.ppo import ActorConfig, PPOConfig, VllmConfig
from openrlhf.config.sections import LoraConfig


def llama(**changes):
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "architectures": ["LlamaForCausalLM"]}
    return LlamaConfig(**(sizes | changes))


def check(config, **changes):
    options = {"dtype": "fp32", "max_len": 128, "on_cpu": True} | changes
    check_vllm_runs(config, flag="--flag", path="tiny", **options)


def test_the_lists_are_read_from_vllms_source():
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM", "GPTNeoXForCausalLM"} <= registered_architectures()
    # the list leaves out architectures whose models were removed
    assert "MptForCausalLM" not in registered_architectures()
    assert {32, 64, 128} <= set(cpu_head_sizes()) and not {8, 48} & set(cpu_head_sizes())


@pytest.mark.parametrize("config", [llama(num_attention_heads=8), llama(head_dim=8)])
def test_a_head_size_without_a_kernel(config):
    with pytest.raises(ValueError, match=r"--flag tiny: .* heads have size 8, and on a CPU only 32, 64, 80"):
        check(config)
    check(config, on_cpu=False)


def test_a_run_of_rl_asks_once_it_is_known_that_there_are_no_gpus(tmp_path):
    llama(num_attention_heads=8).save_pretrained(tmp_path)
    config = PPOConfig(actor=ActorConfig(model_name_or_path=str(tmp_path)))
    check_engines(config, on_cpu=False)
    with pytest.raises(ValueError, match=f"--actor.model_name_or_path {tmp_path}: vLLM .* heads have size 8"):
        check_engines(config, on_cpu=True)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match=r"12 .*tensor_parallel_size 5.\nUse 1, 2, 3, 4, 6, 12"):
        check(llama(hidden_size=384, num_attention_heads=12), tensor_parallel_size=5)


def stretched(kind, limit):
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    return llama(max_position_embeddings=limit, rope_parameters=rope)


@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
def test_a_rope_that_vllm_does_not_stretch(kind):
    check(stretched(kind, 128))
    with pytest.raises(ValueError, match=f"type {kind} ends .* max_position_embeddings 128, .* 512 tok"):
        check(stretched(kind, 128), max_len=512)
    check(stretched(kind, 512), max_len=512)
    check(stretched("linear", 128), max_len=512)


def test_a_model_that_is_unstable_in_half_precision():
    gemma = Gemma2Config(architectures=["Gemma2ForCausalLM"])
    with pytest.raises(ValueError, match=r"gemma2 is not stable in float16\.\nUse --ds.param_dtype bf16"):
        check(gemma, dtype="fp16")
    check(gemma, dtype="bf16")


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"])
def test_linear_attention_on_a_cpu(architecture):
    config = Qwen3NextConfig(architectures=[architecture], head_dim=128)
    with pytest.raises(ValueError, match=r"computes in bf16 alone\.\nUse --ds.param_dtype bf16, or a GPU"):
        check(config, dtype="fp32")
    check(config, dtype="bf16")
    check(config, dtype="fp32", on_cpu=False)


def test_an_architecture_that_vllm_does_not_have():
    with pytest.raises(ValueError, match="no implementation of CodeGenForCausalLM"):
        check(CodeGenConfig(architectures=["CodeGenForCausalLM"]))


@pytest.mark.parametrize(
    "config",
    [
        llama(),
        llama(architectures=["OfMyOwnForCausalLM"], auto_map={"AutoModelForCausalLM": "own.Own"}),
        llama(architectures=["LlamaModel"]),  # vLLM finds it as LlamaForCausalLM
        llama(architectures=None),
        # vLLM reads it through transformers
        CTRLConfig(architectures=["CTRLLMHeadModel"], n_embd=64, n_head=2),
        DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], qk_rope_head_dim=8),
        MambaConfig(architectures=["MambaForCausalLM"]),
    ],
)
def test_an_uncertain_architecture_is_left_to_vllm(config):
    check(config)


def test_a_model_without_layers_for_adapters(tmp_path):
    """Falcon's class supports none; GPT-NeoX is read by transformers, which only vLLM can tell."""
    options = {"flag": "--flag", "path": "tiny"}
    for config in (llama(), Qwen3Config(architectures=["Qwen3ForCausalLM"])):
        check_vllm_adapts(config, **options)
    check_vllm_adapts(GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"]), **options)
    falcon = FalconConfig(architectures=["FalconForCausalLM"])
    told = "--vllm.lora_sync adapter: vLLM has no LoRA layers for FalconForCausalLM"
    with pytest.raises(ValueError, match=told):
        check_vllm_adapts(falcon, **options)
    falcon.save_pretrained(tmp_path)
    config = PPOConfig(actor=ActorConfig(model_name_or_path=str(tmp_path)))
    check_engines(config, on_cpu=False)
    adapted = replace(config, ds=replace(config.ds, lora=LoraConfig(rank=8)))
    check_engines(adapted, on_cpu=False)
    with pytest.raises(ValueError, match=told):
        check_engines(replace(adapted, vllm=VllmConfig(lora_sync="adapter")), on_cpu=False)
