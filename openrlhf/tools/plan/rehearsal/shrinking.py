"""Shrinks models: keeps the architecture of a config.json, with few layers, small widths and random
weights."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from openrlhf.api import (
    CLASSIFIER_HEAD,
    WEIGHTS,
    ErrorCode,
    UsageError,
    first_line,
    load_config,
    model_folder,
    register_classifier,
)

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KEYS = ("num_key_value_heads", "num_kv_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp")
"""Names of each size in the configurations of different architectures."""

MOST_LAYERS = 4
HEAD = 32
"""Size of an attention head: the smallest that vLLM's kernels for CPUs support."""
WIDTH = 64
"""Hidden size if config.json sets the size of a head separately."""
MOST = {
    **dict.fromkeys(INNER, 2 * WIDTH),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    "sliding_window": 32,
    "num_kv_shared_layers": 0,
    **dict.fromkeys(("hidden_size_per_layer_input", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), HEAD),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Maximum values of further sizes. A window of 32 tokens is shorter than most sequences."""
INIT = 0.05
"""Standard deviation of the weights. It is so large that every token influences the predictions."""
SMALL_FILE = 64 << 20
"""Maximum bytes of a file, such as a tokenizer's, that is copied to the shrunk model."""


def shrunk_model(
    path: str, flag: str, folder: Path, *, seed: int, scores: bool, head: str = CLASSIFIER_HEAD
) -> Path:
    """Writes a shrunk model with random weights to `folder`, with the tokenizer and processor of `path`.
    Reads no weights. Returns `folder`. Raises UsageError if there is no configuration, or its architecture
    cannot be shrunk.

    Args:
        path: name or folder of the model.
        flag: flag of the model, for errors.
        folder: folder to write.
        seed: seed of the weights.
        scores: True for a reward model with a scalar head.
        head: name of this head.
    """
    config = load_config(path, flag)
    try:
        small = shrunk_config(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = find_class(small, scores=scores)(small).to(torch.float32)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, StrictDataclassError) as error:
        text = (
            f"its architecture ({config.model_type}) cannot be shrunk: {first_line(error)}.\n"
            "Try the run itself with a small model of the same family."
        )
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag=flag, value=path) from error
    if hasattr(model, CLASSIFIER_HEAD):
        setattr(model, getattr(small, "value_head_prefix", None) or head, model._modules.pop(CLASSIFIER_HEAD))
    model.save_pretrained(folder)
    _copy_readers(path, folder)
    return folder


def shrunk_config(config: Any) -> Any:
    """Returns the configuration with small sizes. Other properties do not change, such as the vocabulary, the
    kinds of layers, tied weights and RoPE."""
    tree = config.to_dict()
    for key in ("quantization_config", "auto_map", "transformers_version"):
        tree.pop(key, None)
    parts = {name for name in config.sub_configs if isinstance(tree.get(name), dict)}
    text = next((n for n in parts if getattr(config, n) is config.get_text_config()), None)
    inner = tree[text] if text else tree
    _shrink_text(inner)
    hidden = _value(inner, HIDDEN)
    for name in parts - {text}:
        _shrink_encoder(tree[name], hidden)
    for part in (tree, *(tree[name] for name in parts)):
        part["dtype"] = "float32"
        part.pop("torch_dtype", None)
    return type(config).from_dict(tree)


def _value(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _set(values: dict[str, Any], names: Sequence[str], new: int) -> None:
    """Sets the fields that exist. A list with a value for each layer keeps its length."""
    for name in names:
        if isinstance(values.get(name), list):
            values[name] = [new] * len(values[name])
        elif values.get(name) is not None:
            values[name] = new


def _shrink_text(values: dict[str, Any]) -> None:
    _shrink_layers(values)
    _shrink_attention(values)
    for name, most in MOST.items():
        if values.get(name) is not None:
            _set(values, (name,), min(values[name], most) if isinstance(values[name], int) else most)
    if values.get("qk_head_dim"):
        values["qk_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    if isinstance(values.get("initializer_range"), float):
        values["initializer_range"] = INIT


def _shrink_layers(values: dict[str, Any]) -> None:
    """Keeps one layer of each kind, and at least two."""
    count = _value(values, LAYERS)
    if not isinstance(count, int):
        raise ValueError(f"no field with the number of layers ({', '.join(LAYERS)})")
    listed = [name for name, value in values.items() if isinstance(value, list) and len(value) == count]
    listed = [name for name in listed if name not in ("eos_token_id", "architectures")]
    sparse, dense = values.get("decoder_sparse_step") or 1, values.get("first_k_dense_replace") or 0
    apart = values.get("mlp_only_layers") or []

    def kind(i: int) -> tuple:
        return (*(str(values[name][i]) for name in listed), i < dense, i in apart, (i + 1) % sparse)

    first: dict[tuple, int] = {}
    for i in range(count):
        first.setdefault(kind(i), i)
    kept = [*first.values()][:MOST_LAYERS]
    kept = sorted([*kept, *(i for i in range(count) if i not in kept)][: max(len(kept), min(2, count))])
    for name in listed:
        values[name] = [values[name][i] for i in kept]
    if apart:
        values["mlp_only_layers"] = [new for new, old in enumerate(kept) if old in apart]
    if dense:
        values["first_k_dense_replace"] = sum(i < dense for i in kept)
    for name in ("decoder_sparse_step", "full_attention_interval", "sliding_window_pattern"):
        if isinstance(values.get(name), int):
            values[name] = min(values[name], len(kept))
    if isinstance(values.get("max_window_layers"), int):
        values["max_window_layers"] = min(values["max_window_layers"], len(kept) - 1)
    _set(values, LAYERS, len(kept))


def _shrink_attention(values: dict[str, Any]) -> None:
    """Shrinks heads and hidden size. The number of query heads per key head stays the same if config.json
    sets the size of a head. Otherwise it becomes at most 2, because the hidden size, and with it the
    embedding, would grow with the number of heads."""
    heads, hidden = _value(values, HEADS), _value(values, HIDDEN)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        raise ValueError("no field with the number of heads or the hidden size")
    keys = _value(values, KEYS) or heads
    own = values.get("head_dim")
    is_latent = values.get("kv_lora_rank") is not None
    few_keys = min(keys, 2)
    ratio = max(1, heads // keys)
    few_heads = few_keys * (ratio if own else min(ratio, 4 // few_keys))
    before = own or hidden // heads
    size = min(before, HEAD)
    _set(values, HEADS, few_heads)
    _set(values, KEYS, few_keys)
    _set(values, HIDDEN, WIDTH if own else few_heads * size)
    if is_latent:
        return
    _set(values, ("head_dim", "global_head_dim"), size)
    if isinstance(rotary := values.get("rotary_dim"), int):
        values["rotary_dim"] = max(2, rotary * size // before // 2 * 2)
    for name in ("rope_parameters", "rope_scaling"):
        _shrink_rope(values.get(name), size, before)


def _shrink_rope(rope: Any, size: int, before: int) -> None:
    if not isinstance(rope, dict):
        return
    for key, value in rope.items():
        if isinstance(value, dict):  # the settings of a kind of layer
            _shrink_rope(value, size, before)
        elif key == "mrope_section":
            sections = [n * size // before for n in value]
            sections[0] += sum(value) * size // before - sum(sections)
            rope[key] = sections
        elif key in ("short_factor", "long_factor"):
            rope[key] = value[: max(1, len(value) * size // before)]


def _shrink_encoder(values: dict[str, Any], hidden: int) -> None:
    """Shrinks an encoder of images. `hidden`: the hidden size of the language model."""
    _set(values, ("depth", *LAYERS), 2)
    _set(values, HEADS, 2)
    out = ("out_hidden_size",)
    if values.get("embed_dim") is not None:  # Qwen2-VL, whose hidden size is that of the language model
        out = ("out_hidden_size", "hidden_size")
    _set(values, ("embed_dim", *HIDDEN), WIDTH)
    _set(values, out, hidden)
    _set(values, INNER, 2 * WIDTH)
    _set(values, KEYS, 2)
    _set(values, ("head_dim", "global_head_dim"), HEAD)
    if values.get("fullatt_block_indexes"):
        values["fullatt_block_indexes"] = [1]
    if values.get("deepstack_visual_indexes"):
        values["deepstack_visual_indexes"] = [0]
    if isinstance(values.get("initializer_range"), float):
        values["initializer_range"] = INIT


def find_class(config: Any, *, scores: bool = False) -> Any:
    """Returns transformers' class of a model: a sequence classifier with one label, if config.json names one
    or `scores` is True; else the class that it names, or a causal language model."""
    name = (config.architectures or [""])[0]
    if scores or name.endswith("ForSequenceClassification"):
        config.num_labels = 1
        register_classifier(config)
        return AutoModelForSequenceClassification._model_mapping[type(config)]
    if name.endswith(("ForCausalLM", "ForConditionalGeneration")) and hasattr(transformers, name):
        return getattr(transformers, name)
    text = type(config) in AutoModelForCausalLM._model_mapping
    return (AutoModelForCausalLM if text else AutoModelForImageTextToText)._model_mapping[type(config)]


def _copy_readers(path: str, folder: Path) -> None:
    """Copies the small files of a model except config.json: tokenizer, chat template, processor."""
    place = Path(model_folder(path))
    if not place.is_dir():
        place = Path(snapshot_download(path, ignore_patterns=[*WEIGHTS]))
    for file in place.iterdir():
        is_ours = file.name == "config.json" or file.name.endswith(".index.json")
        is_small = file.is_file() and file.stat().st_size <= SMALL_FILE
        if is_small and not is_ours and not any(map(file.match, WEIGHTS)):
            shutil.copyfile(file, folder / file.name)
