from dataclasses import replace

import pytest
import torch

from openrlhf.cluster.engine_pool import engine_options
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig, ChatVllmConfig, InferenceVllmConfig
from openrlhf.config.ppo import PPOConfig, VllmConfig
from openrlhf.engine.vllm_engine import EngineOptions

FLAGS = {"enforce_eager": True, "gpu_memory_utilization": 0.5, "kv_cache_gb": 2.0}


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(vllm=VllmConfig(**FLAGS)),
        BatchInferenceConfig(vllm=InferenceVllmConfig(**FLAGS)),
        ChatConfig(vllm=ChatVllmConfig(**FLAGS)),
    ],
    ids=lambda config: type(config).__name__,
)
def test_every_command_hands_its_flags_on(config):
    options = EngineOptions.of(config, model="m", max_len=7, on_gpu=False, enable_prefix_caching=True)
    assert options == EngineOptions(
        model="m",
        dtype=config.ds.param_dtype,
        max_len=7,
        seed=config.train.seed,
        transfer_backend="gloo",
        on_gpu=False,
        enable_prefix_caching=True,
        **FLAGS,
    )


@pytest.mark.parametrize(("asked", "expected"), [(None, 4), (2, 2)])
def test_an_engine_takes_all_gpus_unless_told_otherwise(monkeypatch, asked, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = ChatConfig(vllm=ChatVllmConfig(tensor_parallel_size=asked))
    options = EngineOptions.of(config, model="m", max_len=7, on_gpu=True)
    assert (options.tensor_parallel_size, options.transfer_backend) == (expected, "nccl")


def test_the_engines_of_a_run_start_without_weights_and_take_them_as_the_run_sends_them():
    config = PPOConfig()
    shared = replace(config, train=replace(config.train, colocate_all=True))
    assert engine_options(config, on_gpu=True).transfer_backend == "nccl"
    assert engine_options(shared, on_gpu=True).transfer_backend == "ipc"
    assert engine_options(shared, on_gpu=False).transfer_backend == "gloo"
    assert not engine_options(config, on_gpu=True).load_weights
    assert engine_options(config, on_gpu=True, from_files=True).load_weights
