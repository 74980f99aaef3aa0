"""The configuration of a model: loads and checks it, builds the model without weights, and identifies the
model by its files."""

import difflib
import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from openrlhf.config.fields import flag_values, format_flag
from openrlhf.data.cache import digest, file_digest, sampled_digest
from openrlhf.errors import ErrorCode, UsageError, first_line
from openrlhf.hub import model_folder
from openrlhf.models.weight_files import quantized_type

DTYPES: Mapping[str | None, Any] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    None: "auto",
}
"""Maps `--ds.param_dtype` to transformers' `dtype` argument. None: the dtype of the model's files."""


LARGEST = {r"layers?$|depth$|blocks$": 2000, r"labels$|experts$|heads$": 100_000}
"""Largest values of a configuration's numbers of parts, which transformers would build one by one."""


def load_config(path: str, flag: str):
    """Returns the model's configuration. Raises UsageError if there is none. Loads no weights."""
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        reason = ", not a whole model. Merge the adapter into its base first:"
        if any(Path(path).glob("model*.safetensors")):
            reason = (
                ", and weights of a model, too. Move one of them away, or merge the adapter into its base:"
            )
        text = (
            f"the folder holds a LoRA adapter{reason}\n"
            f"openrlhf lora_combiner --model_path BASE --lora_path {path} --output_path MERGED"
        )
        raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)
    with loading("model configuration", path, flag):
        folder = model_folder(path)
        _check_counts(PreTrainedConfig.get_config_dict(folder)[0])
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


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
    if name := _method(config) or quantized_type(path):
        text = (
            f"its weights are quantized ({name}), and only ordinary ones can be trained and saved.\n"
            "Name the model from which it was made, or dequantize it first (docs/models.md). To save memory, "
            "--ds.load_in_4bit quantizes ordinary weights as they are loaded."
        )
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag=flag, value=path)
    return config


def load_readable(path: str, flag: str) -> PreTrainedConfig:
    """Like `load_config`. Raises UsageError for quantized files if config.json does not say how they are
    quantized: transformers would take the numbers in them for the weights."""
    config = load_config(path, flag)
    if not _method(config) and (name := quantized_type(path)):
        text = f"its weights are quantized ({name}), and its config.json has no quantization_config.\n"
        raise UsageError(ErrorCode.UNSUPPORTED, f"{text}Copy config.json again.", flag=flag, value=path)
    return config


def _method(config: PreTrainedConfig) -> Any:
    """Returns the method by which config.json says that a model is quantized; "" without one."""
    parts = [getattr(part, "quantization_config", None) for part in (config, config.get_text_config())]
    return next((part.get("quant_method", part) for part in parts if part), "")


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


LOADING_KWARGS = ("ignore_mismatched_sizes", "use_safetensors", "weights_only")
"""Options of transformers' `from_pretrained` that are no attributes of a configuration."""


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


def without_weights(path: str, flag: str, *, images: bool) -> PreTrainedModel:
    """Builds the model on torch's meta device. Raises UsageError for sizes that no model can have."""
    auto_class = AutoModelForImageTextToText if images else AutoModelForCausalLM
    config = load_config(path, flag)
    check_class(auto_class, config, path, flag)
    return built(auto_class, config, path, flag)


def built(auto_class: Any, config: PreTrainedConfig, path: str, flag: str) -> PreTrainedModel:
    with loading("model with this config.json", path, flag), torch.device("meta"):
        return auto_class.from_config(config, trust_remote_code=False, attn_implementation="eager")


def has_experts(path: str, flag: str) -> bool:
    """Returns True if the model is a mixture of experts: if its configuration has an entry with a number of
    experts."""
    settings = load_config(path, flag).get_text_config().to_dict()
    return any("expert" in name and isinstance(value, int) and value > 1 for name, value in settings.items())


def names_beside_model(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the names in transformers' file of a language model with this configuration; {} without one."""
    model_type: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return vars(sys.modules[model_type.__module__]) if model_type else {}


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
