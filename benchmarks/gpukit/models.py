"""Models of random weights with the shapes of Qwen3, and rows of random tokens for them."""

import openrlhf  # noqa: F401  first: it repairs imports of CUDA builds

# isort: split
import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from gpukit.stage import Setting
from openrlhf.models.attention import PACKED
from openrlhf.rows import PackedRow, Sample

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
VOCABULARY = 151_936
ROW_TOKENS = 16_384


def config_of(shape: str, setting: Setting, **changes: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=setting.size(VOCABULARY, 512),
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=None,
        dtype="bfloat16",
        **(SHAPES[shape] | changes),
    )


def language_model(config: Qwen3Config, setting: Setting) -> Any:
    """Builds a model with random bf16 weights, the same every time, on the device."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.set_attn_implementation(PACKED)
    return model


def packed_rows(setting: Setting, count: int, *, prompt: float = 0.0) -> list[PackedRow]:
    """Makes rows of random tokens. Documents have lognormal lengths with a median of 700 tokens; the share
    `prompt` of each document has no loss."""
    random = torch.Generator().manual_seed(0)
    capacity, median = setting.size((ROW_TOKENS, 700), (256, 30))
    rows = []
    for _ in range(count):
        samples, room = [], capacity
        while room > 1:
            wanted = math.exp(math.log(median) + 0.8 * float(torch.randn((), generator=random)))
            length = min(room, max(2, round(wanted)))
            mask = torch.arange(length) >= max(1, int(prompt * length))
            tokens = torch.randint(3, setting.size(VOCABULARY, 512), (length,), generator=random)
            samples.append(Sample(token_ids=tokens, action_mask=mask))
            room -= length
        rows.append(PackedRow.of(samples))
    return rows


def training_flops(config: Qwen3Config, row: PackedRow, *, frozen: bool = False) -> float:
    """Returns the operations of the matrix products, without those that checkpointing repeats.

    Forward: two for each token and weight of a product, and attention's two products for each pair of tokens
    of a document; the head reads the tokens that have a loss. Backward: twice that; with frozen weights
    (LoRA) once, for the gradients of the inputs.
    """
    heads = config.num_attention_heads * config.head_dim
    keys = (config.num_key_value_heads or config.num_attention_heads) * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * keys + 3 * config.intermediate_size)
    weights = 2 * config.num_hidden_layers * layer * len(row.token_ids)
    head = 2 * config.vocab_size * config.hidden_size * len(row.actions)
    pairs = sum(length**2 for length in row.lengths) / 2
    attention = 2 * 2 * config.num_hidden_layers * heads * pairs
    return (2 if frozen else 3) * (weights + head) + 3 * attention
