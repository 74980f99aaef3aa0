"""The torch backend on a tiny model, which trains on two samples."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from openrlhf.backends.torch.engine import TorchEngine
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, OptimConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import Sample

BETA1 = 0.9


def saved_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attention_dropout=0.5,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def sample(*token_ids: int) -> Sample:
    return Sample(token_ids=torch.tensor(token_ids), action_mask=torch.arange(len(token_ids)) > 0)


SAMPLES = sample(3, 4, 5, 6), sample(7, 8)


def engine_of(
    folder: Path, dtype: str = "fp32", lr: float = 1e-3, *, dropout: bool = True, **options
) -> TorchEngine:
    return TorchEngine(
        lambda: PolicyModel(load_causal_lm(str(folder), flag="--model", dtype=dtype, attention="auto")),
        optim=OptimConfig(adam=AdamConfig(lr=lr, betas=(BETA1, 0.95)), **options),
        ds=DeepSpeedConfig(param_dtype=dtype),
        total_steps=10,
        dropout=dropout,
    )
