"""Loads models, tokenizers and configurations from a name or a path."""

import difflib
import logging
import os
import pickle
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from openrlhf.config.fields import flag_values, format_flag
from openrlhf.data.cache import digest, file_digest, sampled_digest
from openrlhf.data.encode import tokenize_text
from openrlhf.data.image_rows import load_auto_processor
from openrlhf.data.templates import ending
from openrlhf.errors import ErrorCode, UsageError, counted, first_line, notify, notify_once
from openrlhf.hub import model_folder
from openrlhf.models.attention import PACKED, lacks_its_kernel, of_text, resolve_attention
from openrlhf.models.backbone import get_row_layout
from openrlhf.models.checkpoint_layout import forget_unused_conversions
from openrlhf.models.liger import apply_liger
from openrlhf.models.rope import fix_frequencies
from openrlhf.models.vision import image_reader
from openrlhf.models.weight_files import check_weight_files, eight_bit
from openrlhf.text import decode

logger = logging.getLogger(__name__)

DTYPES: Mapping[str | None, Any] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    None: "auto",
}
"""Maps `--ds.param_dtype` to transformers' `dtype` argument. None: the dtype of the model's files."""
GENERATION = "generation_config.json"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt", "spiece*", "sentencepiece*")


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


def check_class(auto_class: Any, config: PreTrainedConfig, path: str, flag: str) -> None:
    """Raises UsageError if transformers has no such class of model for the architecture."""
    if type(config) in auto_class._model_mapping:
        return
    text = f"transformers has no {auto_class.__name__.removeprefix('Auto')} for its architecture, "
    text += f"{config.model_type}.\nName another model."
    if type(config) in AutoModelForImageTextToText._model_mapping:
        text = (
            f"a {config.model_type} reads images, which are not read here.\nCommands that train it need "
            "--data.max_images_per_prompt 1; a row without images has [] as --data.image_key."
        )
    raise UsageError(ErrorCode.UNSUPPORTED, text, flag=flag, value=path)


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


LOADING_KWARGS = ("ignore_mismatched_sizes", "use_safetensors", "weights_only")
"""Options of transformers' `from_pretrained` that are no attributes of a configuration."""


def apply_kwargs(
    config: PreTrainedConfig, model_kwargs: Mapping[str, Any], path: str, flag: str
) -> dict[str, Any]:
    """Sets attributes of a model's configuration, and returns the other options of `from_pretrained`. Raises
    UsageError for a name that is neither, and for a value that the attribute cannot have. `flag`: the flag
    that names the model."""
    others: dict[str, Any] = {}
    key = flag.replace("model_name_or_path", "model_kwargs")
    for name, value in model_kwargs.items():
        if name in LOADING_KWARGS:
            others[name] = value
            continue
        if not hasattr(config, name):
            near = difflib.get_close_matches(name, [*config.to_dict(), *LOADING_KWARGS], n=1)
            text = f"neither the configuration of {path} nor from_pretrained has {name}; "
            text += f"did you mean {near[0]}?" if near else "remove it"
            raise UsageError(ErrorCode.UNKNOWN_FLAG, text, flag=key, value=name)
        try:
            if isinstance(inner := getattr(config, name), PreTrainedConfig):
                apply_kwargs(inner, value, path, flag)
            else:
                setattr(config, name, value)
        except (AttributeError, StrictDataclassError) as error:
            text = f"cannot be {value!r}: {first_line(error)}"
            raise UsageError(ErrorCode.INVALID_VALUE, text, flag=f"{key}.{name}") from error
    return others


def without_weights(path: str, flag: str, *, images: bool) -> PreTrainedModel:
    """Builds the model on torch's meta device. Raises UsageError for sizes that no model can have."""
    auto_class = AutoModelForImageTextToText if images else AutoModelForCausalLM
    config = load_config(path, flag)
    check_class(auto_class, config, path, flag)
    return _built(auto_class, config, path, flag)


def _built(auto_class: Any, config: PreTrainedConfig, path: str, flag: str) -> PreTrainedModel:
    with loading("model with this config.json", path, flag), torch.device("meta"):
        return auto_class.from_config(config, trust_remote_code=False, attn_implementation="eager")


def load_generator(
    path: str, *, flag: str, dtype: str, attention: str, max_len: int, in_4bit: bool = False
) -> PreTrainedModel:
    """Loads a model for transformers' `generate`, with one of transformers' attention implementations.
    `attention` auto: transformers' default."""
    config = load_config(path, flag)
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


def nf4(dtype: str | None, config: PreTrainedConfig) -> dict[str, BitsAndBytesConfig]:
    """Returns transformers' option for QLoRA's 4-bit weights (https://arxiv.org/abs/2305.14314), with matrix
    products in `dtype`; None: in the dtype of the model's files."""
    in_type = (config.dtype or torch.float32) if dtype is None else DTYPES[dtype]
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=in_type,
        )
    }


def keep_nf4(model: PreTrainedModel) -> None:
    """Keeps bitsandbytes from repacking the weights permanently, with coarser scales, at the first evaluation
    on CPUs with bf16 products."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.__dict__["support_avx512bf16_for_cpu"] = False
    if getattr(model, "is_loaded_in_4bit", False):
        check_nf4(model)


def check_nf4(model: PreTrainedModel) -> None:
    """Raises UsageError if bitsandbytes computes wrong 4-bit weights for a layer's input size on this
    machine, as its kernel for CPUs with AVX-512 does for some. Compares random weights of each input size
    with an NF4 of our own."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    states = {w.shape[-1]: w for p in model.parameters() if (w := getattr(p, "quant_state", None))}
    wrong: dict[int, float] = {}
    for size, state in states.items():
        random = torch.randn(128, size, generator=torch.Generator().manual_seed(0))
        weight = random.to(state.absmax.device, state.dtype)
        packed, of_packed = quantize_4bit(
            weight, blocksize=state.blocksize, quant_type=state.quant_type, compress_statistics=state.nested
        )
        weight, found = weight.float(), dequantize_4bit(packed, of_packed).float()
        right = round_to_nf4(weight, state.blocksize)
        if not (found - right).norm() < 0.5 * (right - weight).norm():
            wrong[size] = float((found - weight).norm() / weight.norm())
    if wrong:
        sizes = ", ".join(f"{size} inputs (relative error {e:.2f})" for size, e in sorted(wrong.items()))
        text = (
            f"bitsandbytes computes wrong 4-bit weights on this machine for layers of {sizes}, where NF4 has "
            "0.09.\nUse a GPU, a model whose sizes are multiples of 64, or remove the flag."
        )
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--ds.load_in_4bit")


def round_to_nf4(weight: torch.Tensor, blocksize: int) -> torch.Tensor:
    """Returns a float32 weight rounded to NF4 (https://arxiv.org/abs/2305.14314, appendix E): quantiles of
    the normal distribution, scaled to the largest absolute value of each block."""
    quantiles = lambda n: torch.special.ndtri(torch.linspace(0.9677083, 0.5, n, dtype=torch.float64)[:-1])
    code = torch.cat([-quantiles(8), torch.zeros(1), quantiles(9).flip(0)]).to(weight) / quantiles(9).max()
    blocks = nn.functional.pad(weight.flatten(), (0, -weight.numel() % blocksize)).view(-1, blocksize)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
    rounded = code[torch.bucketize(blocks / scale, (code[1:] + code[:-1]) / 2)] * scale
    return rounded.flatten()[: weight.numel()].view_as(weight)


def load_tokenizer(
    path: str, *, flag: str, use_fast: bool = True, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer. If it has no pad token, the end-of-sequence token becomes the pad token. Raises
    UsageError if there is no tokenizer."""
    folder = Path(path)
    if os.path.isdir(folder) and not any(next(folder.glob(name), None) for name in TOKENIZER_FILES):
        # transformers would create an empty tokenizer
        text = "the folder has no tokenizer. Save one beside the model."
        raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)
    with loading("tokenizer", path, flag):
        tokenizer = cast(
            Any, AutoTokenizer.from_pretrained(model_folder(path), use_fast=use_fast, trust_remote_code=False)
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def policy_tokenizer(config: Any) -> PreTrainedTokenizerBase:
    """Loads the policy's tokenizer, with which a run encodes prompts and decodes responses."""
    flag, path = config.trained_models["policy"]
    return load_tokenizer(
        path,
        flag=flag,
        use_fast=not config.data.disable_fast_tokenizer,
        chat_template=config.data.tokenizer_chat_template,
    )


def policy_processor(config: Any) -> Any:
    """Returns the policy's tokenizer or, if prompts have images, its processor with that tokenizer."""
    tokenizer = policy_tokenizer(config)
    if not config.reads_images:
        return tokenizer
    return processor_around(tokenizer, config.trained_models["policy"][1])


def saved_reader(tokenizer: PreTrainedTokenizerBase, path: str, *, images: bool) -> Any:
    """Returns what is saved beside a model that was made from the one at `path`: the tokenizer or, if the
    model reads images, even if no row has some, its processor with that tokenizer."""
    config, folder = load_config(path, ""), Path(model_folder(path))
    classes = (AutoModelForCausalLM, AutoModelForImageTextToText)
    of_text, of_images = (auto_class._model_mapping.get(type(config), None) for auto_class in classes)
    has_processor = not folder.is_dir() or any(folder.glob("*processor_config.json"))
    if images or (has_processor and of_text and of_text is of_images):
        return processor_around(tokenizer, path)
    return tokenizer


def processor_around(tokenizer: PreTrainedTokenizerBase, path: str) -> Any:
    """Loads the processor of a vision-language model and gives it this tokenizer and its chat template."""
    with loading("processor", path):
        processor = load_auto_processor(path)
    processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template
    return processor


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns all tokens that end a response: the tokenizer's end-of-sequence token, and those in the
    generation config."""
    ids, path = {tokenizer.eos_token_id}, model_folder(path)
    if os.path.exists(os.path.join(path, GENERATION)) or not os.path.exists(path):
        try:
            found = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:  # a hub model without a generation config
            found = None
        more = found if isinstance(found, list) else [found]
        if any(type(token) not in (int, NoneType) for token in more):
            text = f"{GENERATION} has eos_token_id {found!r}. Write the number of the token there, or a list."
            raise UsageError(ErrorCode.INVALID_MODEL, text, value=path)
        ids.update(more)
    return sorted(ids - {None})


def template_end(config: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens with which the chat template ends an answer; none if it is not used."""
    is_chat = getattr(config.data, "apply_chat_template", False) and tokenizer.chat_template
    return tokenize_text(ending(tokenizer)[0], tokenizer) if is_chat else []


def check_stops(config: Any, tokenizer: PreTrainedTokenizerBase, *, learns: bool = False) -> None:
    """Raises UsageError if no token ends a response of the run's model, or if the chat template ends an
    answer with another. `learns`: True if the model learns ends: the tokenizer's, or the template's, which
    then is an end token of the exported model."""
    section = "actor" if hasattr(config, "actor") else "model"
    flag, path = f"--{section}.model_name_or_path", getattr(config, section).model_name_or_path
    ids, end = stop_token_ids(path, tokenizer), template_end(config, tokenizer)
    if not ids or (learns and tokenizer.eos_token_id is None and not end):
        text = "no token ends a response. Set eos_token in the tokenizer_config.json of the model."
        raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)
    if end and not learns and not set(end) & set(ids):
        text = (
            f"the chat template ends an answer with {decode(tokenizer, end)!r}, which has no stop token: "
            "answers would never end.\nAdd the token to eos_token_id in generation_config.json."
        )
        raise UsageError(ErrorCode.CHAT_TEMPLATE, text, flag="--data.apply_chat_template", value=path)


def log_stops(config: Any, tokenizer: PreTrainedTokenizerBase, *, learns: bool = False) -> None:
    """Prints the problem that `check_stops` finds, at the start of a run."""
    try:
        check_stops(config, tokenizer, learns=learns)
    except UsageError as problem:
        notify(f"warning: {problem}")
    if learns and (
        learned := set(trained_ends(config, tokenizer))
        - set(stop_token_ids(config.model.model_name_or_path, tokenizer))
    ):
        notify(
            f"note: answers end with {decode(tokenizer, [*learned])!r}, which becomes an end token in the "
            "generation_config.json of the trained model"
        )


def trained_ends(config: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the end tokens of a model that was trained on answers with their ends: those that it had, and
    the first token of the template's end."""
    ids, end = stop_token_ids(config.model.model_name_or_path, tokenizer), template_end(config, tokenizer)
    return ids if set(end) & set(ids) else [*ids, *end[:1]]


def model_digest(path: str, flag: str) -> str:
    """Returns a digest of weights and configuration: of the files in a folder, or a hub model's commit."""
    return _compute_digest(path, flag, file_digest)


def model_fingerprint(path: str, flag: str, *, without: Container[str] = ()) -> str:
    """Returns a cheap variant of `model_digest`, which reads only samples of large files. It changes if a
    model is trained or replaced. `without`: names of files that do not count."""
    return _compute_digest(path, flag, sampled_digest, without)


def _compute_digest(
    path: str, flag: str, of_file: Callable[[Path], str], without: Container[str] = ()
) -> str:
    path = model_folder(path, weights=True)
    if not os.path.isdir(path):
        return str(load_config(path, flag)._commit_hash)
    files = sorted(f for f in Path(path).iterdir() if f.suffix in (".safetensors", ".bin", ".json"))
    return digest([[file.name, of_file(file)] for file in files if file.name not in without])


def reads_tokens_like(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Returns True if all tokens of `other` have the same ids in `own`, which may have more tokens."""
    return other.get_vocab().items() <= own.get_vocab().items()


def check_same_vocabulary(
    own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, flag: str, path: str
) -> None:
    """Raises UsageError unless both tokenizers have the same vocabulary."""
    if own.get_vocab() != other.get_vocab():
        text = (
            f"its vocabulary ({len(other)} tokens) is not that of {own.name_or_path} ({len(own)} tokens).\n"
            "Their probabilities cannot be compared token by token; choose a model of the same family."
        )
        raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)


def check_model(path: str, flag: str) -> None:
    """Raises UsageError if `path` has no configuration of a model that can be built, if the model is
    quantized, or if one of its files is damaged. Prints a note on tokens without an embedding. Loads no
    weights."""
    if os.path.isdir(path):
        check_weight_files(path, flag)
    config = load_unquantized(path, flag)
    if type(config) in AutoModel._model_mapping:
        _built(AutoModel, config, path, flag)
    if any(next(Path(path).glob(name), None) for name in TOKENIZER_FILES):
        note_missing_embeddings(load_tokenizer(path, flag=flag), config, path, flag)


def missing_embeddings(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> dict[int, str]:
    """Returns the tokens, other than the pad token, for which the model has no embedding, by their ids. Some
    models have such tokens and never use them."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    ids = {i: token for token, i in tokenizer.get_vocab().items() if i >= size} if size else {}
    ids.pop(tokenizer.pad_token_id, None)
    return ids


def note_missing_embeddings(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, path: str, flag: str
) -> None:
    """Prints a note on tokens without an embedding."""
    if ids := missing_embeddings(tokenizer, config):
        first, size = min(ids), config.get_text_config().vocab_size
        notify(
            f"note: {flag} {path}: its tokenizer has {len(tokenizer)} tokens, and the model embeds {size}: a "
            f"text with {ids[first]!r} (token {first}) is refused"
        )


def check_room(model_config: PreTrainedConfig, config: Any, *keys: str, path: str) -> None:
    """Raises UsageError if the sum of the lengths that the flags `keys` set exceeds the model's maximum
    length."""
    room, lengths = find_max_length(model_config), [flag_values(config)[key] for key in keys]
    if not room or sum(lengths) <= room:
        return
    total = f" = {sum(lengths)}" if len(keys) > 1 else ""
    flag, _, value = f"{' + '.join(format_flag(config, key) for key in keys)}{total}".partition(" ")
    left = room - sum(lengths[1:])
    remedy = f"Use --{keys[0]} {left}." if left > 0 else "Make them smaller."
    text = f"{path} reads at most {room} tokens.\n{remedy}"
    raise UsageError(ErrorCode.TOO_LONG, text, flag=flag, value=value)


def find_max_length(model_config: PreTrainedConfig) -> int | None:
    """Returns the model's maximum sequence length in tokens; None if its configuration has no limit. Scaled
    RoPE extends max_position_embeddings: `linear` and `dynamic` by the factor, `yarn` to the factor times the
    original positions. Gemma 3's max_position_embeddings already includes the factor."""
    config = model_config.get_text_config()
    limit = room = getattr(config, "max_position_embeddings", None) or 0
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]:
        if rope.get("rope_type") in STRETCHED and not config.model_type.startswith("gemma3"):
            original = rope.get("original_max_position_embeddings") or limit
            room = max(room, int(float(original) * float(rope.get("factor") or 1)))
    return room or None


STRETCHED = ("linear", "dynamic", "yarn")
"""RoPE types whose factor extends max_position_embeddings. For other types it already includes the factor."""


def load_config(path: str, flag: str):
    """Returns the model's configuration. Raises UsageError if there is none. Loads no weights."""
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        text = (
            "the folder holds a LoRA adapter, not a whole model. Merge the adapter into its base first:\n"
            f"openrlhf lora_combiner --model_path BASE --lora_path {path} --output_path MERGED"
        )
        raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)
    with loading("model configuration", path, flag):
        folder = model_folder(path)
        _check_counts(PreTrainedConfig.get_config_dict(folder)[0])
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


LARGEST = {r"layers?$|depth$|blocks$": 2000, r"labels$|experts$|heads$": 100_000}
"""Largest values of a configuration's numbers of parts, which transformers would build one by one."""


def _check_counts(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            _check_counts(value)
        for pattern, largest in LARGEST.items():
            if isinstance(value, int) and value > largest and re.search(pattern, name):
                raise ValueError(f"config.json has {name} {value}, and no model has more than {largest}.")


def load_unquantized(path: str, flag: str) -> PreTrainedConfig:
    """Like `load_config`. Raises UsageError for quantized files, whose weights cannot be trained or saved."""
    config = load_config(path, flag)
    parts = [getattr(part, "quantization_config", None) for part in (config, config.get_text_config())]
    names = [part.get("quant_method", part) for part in parts if part]
    if name := names[0] if names else eight_bit(path):
        text = (
            f"its weights are quantized ({name}), and only ordinary ones can be trained and saved.\n"
            "Name the model from which it was made, or dequantize it first (docs/models.md). To save memory, "
            "--ds.load_in_4bit quantizes ordinary weights as they are loaded."
        )
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag=flag, value=path)
    return config


OF_FILES = (ImportError, OSError, SafetensorError, pickle.UnpicklingError)
OF_FILES += (LookupError, AssertionError, ArithmeticError)
"""Errors of files of weights, of packages that their format needs, and of values in config.json."""


@contextmanager
def loading(
    what: str, path: str, flag: str = "", errors: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Turns errors of transformers inside into a UsageError: `what` could not be loaded from `path`."""
    try:
        yield
    except errors as error:
        code = ErrorCode.INVALID_MODEL if os.path.exists(path) else ErrorCode.NOT_FOUND
        remedy = "Correct its files, or name" if code is ErrorCode.INVALID_MODEL else "Name"
        text = (
            f"no {what} could be loaded from it: {first_line(error)}\n"
            f"{remedy} a folder with config.json, weights and tokenizer, or a model on the hub."
        )
        raise UsageError(code, text, flag=flag, value=path) from error


def has_experts(path: str, flag: str) -> bool:
    """Returns True if the model is a mixture of experts: if its configuration has an entry with a number of
    experts."""
    settings = load_config(path, flag).get_text_config().to_dict()
    return any("expert" in name and isinstance(value, int) and value > 1 for name, value in settings.items())
