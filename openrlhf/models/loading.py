"""Loads models from a name or a path."""

import logging
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from openrlhf.errors import ErrorCode, UsageError, counted, notify_once
from openrlhf.hub import model_folder
from openrlhf.models.attention import PACKED, lacks_its_kernel, of_text, resolve_attention
from openrlhf.models.backbone import get_row_layout
from openrlhf.models.checkpoint_layout import forget_unused_conversions
from openrlhf.models.configurations import (
    DTYPES,
    apply_kwargs,
    built,
    check_class,
    load_readable,
    load_unquantized,
    loading,
)
from openrlhf.models.liger import apply_liger
from openrlhf.models.nf4 import keep_nf4, nf4
from openrlhf.models.rope import fix_frequencies
from openrlhf.models.tokenizers import TOKENIZER_FILES, load_tokenizer, note_missing_embeddings
from openrlhf.models.vision import image_reader
from openrlhf.models.weight_files import check_weight_files

logger = logging.getLogger(__name__)


def load_causal_lm(
    path: str, *, flag: str, images: bool = False, model_kwargs: Mapping[str, Any] = {}, **options: Any
) -> PreTrainedModel:
    """Loads a causal language model for packed rows. images: load a vision-language model, whose rows may
    have images. model_kwargs: see `apply_kwargs`. `options`: see `load_for_rows`."""
    config = load_unquantized(path, flag)
    options |= apply_kwargs(config, model_kwargs, path, flag)
    auto_class = AutoModelForImageTextToText if images else AutoModelForCausalLM
    check_class(auto_class, config, path, flag)
    model, info = load_for_rows(auto_class, config, path, images=images, **options)
    check_loaded(info, path, flag)
    if others := sorted(info["unexpected_keys"]):
        text = f"its files have weights that a {type(model).__name__} lacks, such as {others[0]}"
        notify_once(f"note: {flag} {path}: {text} ({len(others)} of them); they are left out")
    return model


def check_loaded(info: Mapping[str, Any], path: str, flag: str, *, new: str | None = None) -> None:
    """Raises UsageError for weights that the files lack, or have in another shape, which transformers fills
    with random numbers. `info`: what it says of the loading. `new`: beginning of the names of weights that
    shall be random."""
    if others := sorted(info["mismatched_keys"]):
        name, found, expected = others[0]
        text = (
            f"{counted(len(others), 'weight')} of its files do not fit its config.json, such as {name}: "
            f"{tuple(found)},\nnot {tuple(expected)}. Take config.json, weights and tokenizer from one "
            "model; a reward model has one label."
        )
        raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)
    if missing := sorted(key for key in info["missing_keys"] if new is None or not key.startswith(new)):
        text = (
            f"its files lack {counted(len(missing), 'weight')} of the model, such as {missing[0]}, which\n"
            "would be random. Name a folder with the whole model; a reward model has no head for tokens."
        )
        raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)


def load_generator(
    path: str, *, flag: str, dtype: str, attention: str, max_len: int, in_4bit: bool = False
) -> PreTrainedModel:
    """Loads a model for transformers' `generate`, with one of transformers' attention implementations.
    `attention` auto: transformers' default."""
    config = load_readable(path, flag)
    check_class(AutoModelForCausalLM, config, path, flag)
    name = None if attention == "auto" or lacks_its_kernel(attention) else attention
    model, info = _from_files(AutoModelForCausalLM, config, path, dtype, in_4bit, attn_implementation=name)
    check_loaded(info, path, flag)
    fix_frequencies(model, max_len)
    return model


def _from_files(
    auto_class: Any, config: PreTrainedConfig, path: str, dtype: str | None, in_4bit: bool, **options: Any
) -> tuple[Any, dict]:
    """Returns the model and transformers' loading info. Weights of other sizes than those of the model are
    left to `check_loaded`."""
    options |= nf4(dtype, config) if in_4bit else {}
    with loading("weights", path, errors=OF_FILES):
        model, info = auto_class.from_pretrained(
            model_folder(path, weights=True),
            config=config,
            dtype=DTYPES[dtype],
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    keep_nf4(model)
    return model, info


def load_for_rows(
    auto_class: Any,
    config: PreTrainedConfig,
    path: str,
    *,
    dtype: str | None,
    attention: str,
    max_len: int | None = None,
    experts: str | None = None,
    in_4bit: bool = False,
    liger: bool = False,
    images: bool = False,
    **options: Any,
) -> tuple[Any, dict]:
    """Loads a model for packed rows. Returns it and transformers' loading info. The model gets the attention
    for packed rows if its architecture supports it; models/self_check.py determines whether rows may be
    packed.

    dtype: see `DTYPES`. max_len: tokens of the longest sequence of the run, see `fix_frequencies`. in_4bit:
    quantize linear layers except the head to NF4, for models of which only adapters are trained. liger: see
    `apply_liger`. images: rows may have images. `options`: more ones of `from_pretrained`.
    """
    name = resolve_attention(attention, config)
    takes_it = name != PACKED or _takes_attention(auto_class, config)
    options |= {} if experts is None else {"experts_implementation": experts}
    options["attn_implementation"] = of_text(name, config) if takes_it else None
    may_differ = options.pop("ignore_mismatched_sizes", False)
    model, info = _from_files(auto_class, config, path, dtype, in_4bit, **options)
    if may_differ:
        info["mismatched_keys"] = []
    layout = get_row_layout(model)
    layout.flag, layout.packed = attention, takes_it
    layout.images = image_reader(path) if images else None
    if model.dtype == torch.bfloat16 and _emulates_bf16():
        device = torch.cuda.get_device_name()
        logger.warning("a %s only emulates bf16, slowly; --ds.param_dtype fp16 is its own type", device)
    fix_frequencies(model, max_len)
    forget_unused_conversions(model)
    untie_config(model, path)
    if liger:
        apply_liger(model)
        layout.liger = True
    return model, info


def untie_config(model: PreTrainedModel, path: str) -> None:
    """Corrects the configuration of a model whose files have a head of its own, as merges of adapters write
    them, while it ties head and embedding: of an export, vLLM would take the embedding as the head."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    has_own = isinstance(head, nn.Linear) and head.weight is not model.get_input_embeddings().weight
    if has_own and getattr(config, "tie_word_embeddings", False):
        model.config.tie_word_embeddings = config.tie_word_embeddings = False
        text = "config.json ties head and embedding, and the files have two; an export says so"
        notify_once(f"note: {path}: {text}")


def _emulates_bf16() -> bool:
    return torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)


def _takes_attention(auto_class: Any, config: Any) -> bool:
    """Returns True if the architecture looks its attention up in transformers' registry. Code from the hub is
    assumed to do so."""
    model_type = auto_class._model_mapping.get(type(config), None)
    return model_type is None or model_type._can_set_attn_implementation()


def check_model(path: str, flag: str) -> None:
    """Raises UsageError if `path` has no configuration of a model that can be built, if the model is
    quantized, or if one of its files is damaged. Prints a note on tokens without an embedding. Loads no
    weights."""
    if os.path.isdir(path):
        check_weight_files(path, flag)
    config = load_unquantized(path, flag)
    if type(config) in AutoModel._model_mapping:
        built(AutoModel, config, path, flag)
    if any(next(Path(path).glob(name), None) for name in TOKENIZER_FILES):
        note_missing_embeddings(load_tokenizer(path, flag=flag), config, path, flag)


OF_FILES = (ImportError, OSError, SafetensorError, pickle.UnpicklingError)
OF_FILES += (LookupError, AssertionError, ArithmeticError)
"""Errors of files of weights, of packages that their format needs, and of values in config.json."""
