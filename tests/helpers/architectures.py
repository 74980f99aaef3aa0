"""Tiny random models of every causal architecture of transformers."""

import copy
import re
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PARTS = {"text_config", "vision_config", "audio_config", "text_encoder", "patcher_config"}
"""Names of the sub-configurations of models that are made of several parts."""
ALL = tuple(
    name
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not PARTS & set(CONFIG_MAPPING[name].sub_configs)
    and name != "cohere_compass_text"  # needs 3D positions
)
"""Model types that only read text. Language models inside multimodal models have model types of their own."""
VOCABULARY, NUM_LAYERS = 61, 4

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("dim", "emb_dim", "conv_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "dim_ff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_intermediate_size", "shared_expert_intermediate_size"), 24
    ),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    # latent attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    # windows and positions
    **dict.fromkeys(("sliding_window", "attention_window_size"), 8),
    "query_pre_attn_scalar": 8,
    "rotary_dim": 8,
    "rope_pct": 1.0,
    "partial_rotary_factor": 1.0,
    # per-layer inputs
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    # state spaces and linear attention
    **dict.fromkeys(
        ("mamba_d_state", "mamba_d_head", "mamba_n_heads", "mamba_num_heads", "mamba_head_dim"), 8
    ),
    **dict.fromkeys(("state_size", "ssm_state_size", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    "mamba_expand": 2,
    "mamba_d_ssm": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # noise
    **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob", "dropout"), 0.0),
}
"""Small values for the size fields of configurations, by the field's name."""

LEFT_OUT = {
    "gpt_neo": ("num_hidden_layers",),
    "mpt": ("attn_pdrop",),
    "prophetnet": ("num_hidden_layers",),
    "xlnet": ("max_position_embeddings",),
    **dict.fromkeys(
        ("falcon", "bamba", "jamba", "mamba", "xlstm"), ("head_dim", "v_head_dim", "layer_types")
    ),
}
"""Size fields that an architecture computes from other fields."""
EXPERTS = {"num_experts_per_tok": 2, "n_routed_experts": 4}
OWN: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": EXPERTS | {"topk_method": "greedy"},
    "dots1": EXPERTS | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "prophetnet": {"num_decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_attention_heads": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local"] * 2},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further fields that an architecture needs, by its model type."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Returns a four-layer configuration with every kind of layer that the architecture has by default. Each
    call returns a new object, because models write their attention implementation into it."""
    return copy.deepcopy(_tiny_config(model_type))


@cache
def _tiny_config(model_type: str) -> PreTrainedConfig:
    config_type: Any = CONFIG_MAPPING[model_type]
    default = config_type()
    default.allow_global_per_layer_attribute_access = True
    sizes = {
        name: size
        for name, size in SIZES.items()
        if hasattr(default, name)
        and (getattr(default, name) is not None or name == "head_dim")
        and name not in LEFT_OUT.get(model_type, ())
    }
    if getattr(default, "num_key_value_heads", None) == getattr(default, "num_attention_heads", 0):
        sizes["num_key_value_heads"] = 4
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if kinds and "layer_types" not in LEFT_OUT.get(model_type, ()):
        sizes["layer_types"] = (kinds * NUM_LAYERS)[:NUM_LAYERS]
    while True:
        try:
            return config_type(**sizes | OWN.get(model_type, {}))
        except AttributeError as error:  # the size is a property computed from other fields
            found = re.search(r"property '(\w+)' of", str(error))
            name = {"layers_block_type": "layer_types"}.get(found[1], found[1]) if found else ""
            if name not in sizes:
                raise
            del sizes[name]


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a model with random weights so large that every token, position and window changes its
    output."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and float(parameter.std()) < 0.05:
                parameter.normal_(0, 0.15)
    return model
