"""Tiny models of architectures whose weights transformers renames, fuses or splits on load."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf

from openrlhf.tasks.tiny_model import tiny_tokenizer

HEADS = {"head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # the kernels of vLLM support only this rank and the next larger one
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
SMALL = {"moe_intermediate_size": 32}
FAMILIES = {
    "Qwen3": HEADS | {"tie_word_embeddings": True},
    "Mixtral": HEADS | LOCAL_EXPERTS,
    "Ernie4_5_Moe": SMALL
    | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 1},
    "Glm4Moe": HEADS | SMALL | ROUTED_EXPERTS | {"n_group": 1, "topk_group": 1, "use_qk_norm": False},
    "Qwen3Moe": HEADS | SMALL | EXPERTS,
    "Qwen2Moe": SMALL | EXPERTS | {"shared_expert_intermediate_size": 32},
    "Olmoe": EXPERTS,
    "FlexOlmo": EXPERTS,
    "GraniteMoe": LOCAL_EXPERTS,
    "Phimoe": LOCAL_EXPERTS,
    "MiniMaxM2": HEADS | LOCAL_EXPERTS | {"rotary_dim": 32, "scoring_func": "sigmoid"},
    "DeepseekV2": LATENT | SMALL | ROUTED_EXPERTS | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "DeepseekV3": LATENT
    | SMALL
    | ROUTED_EXPERTS
    | {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc"},
    "GptOss": HEADS | LOCAL_EXPERTS | {"sliding_window": 16},
    "GPTNeoX": {},
    "HunYuanMoEV1": HEADS | {"num_experts": 4, "moe_topk": 2},
}


def tiny_family(folder: Path, family: str, seed: int = 0, **changed: Any) -> Path:
    """Writes a model and its tokenizer. Norm weights and router biases vary, so that a wrong one is noticed.
    `changed`: fields of the configuration."""
    tokenizer = tiny_tokenizer()
    options = FAMILIES[family]
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    if family == "GPTNeoX":
        del common["num_key_value_heads"]
    torch.manual_seed(seed)
    config = getattr(hf, f"{family}Config")(**common | options | changed)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or name.endswith("e_score_correction_bias"):
                tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
