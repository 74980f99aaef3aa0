"""Detects settings that vLLM's engines do not run, or with which they would compute something else, before
an engine starts. The tables are those of the vLLM release that this package requires. What they do not know
is refused by vLLM itself, see `refusals` in engine.py."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from pydantic import ConfigDict, TypeAdapter, ValidationError

from openrlhf.backends.vllm.requests import library
from openrlhf.config.pass_through import unknown_option
from openrlhf.errors import ErrorCode, UsageError, first_line
from openrlhf.models.configurations import has_experts, load_config
from openrlhf.plugins import entry_points

MODELS = "model_executor/models"
PLAIN_BASES = ("nn.Module", "MixtureOfExperts", "HasInnerState", "IsHybrid", "IsAttentionFree")
"""Base classes of vLLM's models other than the `Supports...` interfaces."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM has attention kernels on CPUs."""
FLOAT16_UNSTABLE = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Model types that vLLM does not run in float16."""
SUFFIX = re.compile("(ForCausalLM|ForConditionalGeneration|LMHeadModel|ChatModel|Model)$")
"""Suffixes of architecture names. vLLM treats names that differ only in the suffix as the same
architecture."""
CPU_BF16_ONLY = ("Qwen3Next", "Qwen3_5")
"""Beginnings of architectures whose linear attention has kernels for bf16 alone on CPUs."""

STRETCH = {
    "yarn": "Set max_position_embeddings in its config.json to factor times "
    "original_max_position_embeddings; the angles stay the same.",
    "dynamic": "Ask for fewer tokens, or use a model with RoPE of another type.",
}
"""Maps a type of RoPE to a remedy. vLLM does not extend these types beyond max_position_embeddings."""


def check_vllm_runs(
    model_config: Any,
    *,
    flag: str,
    path: str,
    dtype: str,
    max_len: int,
    on_cpu: bool,
    tensor_parallel_size: int = 1,
) -> None:
    """Raises UsageError if vLLM certainly cannot run the model in `dtype` (bf16, fp16 or fp32), or not with
    sequences of `max_len` tokens. Uncertain cases are left to vLLM."""
    for reason in (
        _unknown_architecture(model_config),
        _not_in_half_precision(model_config) if dtype == "fp16" else "",
        _indivisible_heads(model_config.get_text_config(), tensor_parallel_size),
        _short_rope(model_config.get_text_config(), max_len),
        _head_size_without_kernel(model_config.get_text_config()) if on_cpu else "",
        _linear_attention_without_kernel(model_config) if on_cpu and dtype != "bf16" else "",
    ):
        if reason:
            text = f"vLLM does not run this model: {reason}"
            raise UsageError(ErrorCode.UNSUPPORTED, text, flag=flag, value=path)


def check_vllm_adapts(model_config: Any, *, flag: str, path: str) -> None:
    """Raises UsageError if vLLM certainly does not support LoRA for the model. Uncertain cases are left to
    vLLM."""
    for architecture in model_config.architectures or ():
        if takes_adapters(architecture) is False:
            text = (
                f"vLLM has no LoRA layers for {architecture} ({flag} {path}).\n"
                "Remove the flag: adapters are then merged into the weights that engines get."
            )
            raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--vllm.lora_sync", value="adapter")


def adapts_all(path: str, flag: str) -> bool:
    """Returns True if vLLM supports LoRA for each layer of the model at `path`, which `flag` names. Raises
    UsageError if there is no such model."""
    names = load_config(path, flag).architectures or ()
    return any(map(takes_adapters, names)) and not has_experts(path, flag)


def takes_adapters(architecture: str) -> bool | None:
    """Returns True if vLLM's class of the architecture supports LoRA; None if unknown, because base classes
    are in other files. Reads vLLM's source, because its import would take seconds."""
    for file, name in _implementations(architecture):
        classes = {node.name: node for node in _source(file) if isinstance(node, ast.ClassDef)}
        bases, unseen = set(), [name]
        while unseen:
            if (definition := classes.get(unseen.pop())) is not None:
                found = {ast.unparse(base) for base in definition.bases} - bases
                bases |= found
                unseen += found
        if "SupportsLoRA" in bases:
            return True
        if bases and all(b in classes or b in PLAIN_BASES or b.startswith("Supports") for b in bases):
            return False
    return None


def engine_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `--vllm.engine_args` with the types of vLLM's EngineArgs. Raises UsageError for a name or a
    value that they do not have. Imports vLLM if there are any; without vLLM they are returned as they are."""
    if not given or find_spec("vllm") is None:
        return dict(given)
    known = {field.name: field.type for field in fields(library().AsyncEngineArgs)}
    return {name: _argument(name, value, known) for name, value in given.items()}


def _argument(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    flag = f"--vllm.engine_args.{name}"
    if name not in known:
        raise unknown_option("--vllm.engine_args", name, known, "vLLM's EngineArgs have no such field")
    kind = known[name]
    if isinstance(kind, str):  # refers to a class that is not imported
        return value
    own = is_dataclass(kind) or is_dataclass(type(value))  # has settings of its own
    settings = None if own else ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True)
    try:
        return TypeAdapter(kind, config=settings).validate_python(value)
    except ValidationError as error:
        text = f"vLLM expects another value: {first_line(ValueError(error.errors()[0]['msg']))}"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag=flag, value=json.dumps(value)) from error


def _implementations(architecture: str) -> list[tuple[str, str]]:
    """Returns the (file, class) pairs that vLLM's registry lists for the architecture."""
    entries = [
        ast.literal_eval(value)
        for node in _source(f"{MODELS}/registry.py")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for key, value in zip(node.value.keys, node.value.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == architecture and isinstance(value, ast.Tuple)
    ]
    return [(f"{MODELS}/{module}.py", name) for module, name in entries if "." not in module]


def _source(name: str) -> list[ast.stmt]:
    """Returns the parsed top-level statements of a file of vLLM; empty if the file does not exist."""
    folders = (package.submodule_search_locations or []) if (package := find_spec("vllm")) else []
    files = [Path(folder) / name for folder in folders]
    return [part for file in files if file.is_file() for part in ast.parse(file.read_text("utf-8")).body]


def _unknown_architecture(config: Any) -> str:
    """Returns the reason why vLLM does not know the architecture; "" if it does, or may. Only where vLLM
    cannot run transformers' implementation either, it is imported and asked, which takes seconds."""
    names = config.architectures or ()
    plugins = [p for p in entry_points("vllm.general_plugins") if not p.value.startswith("vllm.")]
    if not names or plugins or getattr(config, "auto_map", None) or _runs_by_transformers(names[0]):
        return ""
    if find_spec("vllm") is None:
        return ""
    from vllm import ModelRegistry

    stems = tuple(SUFFIX.sub("", name) for name in names)
    if any(name.startswith(stems) for name in ModelRegistry.get_supported_archs()):
        return ""
    return (
        f"it does not implement {', '.join(names)}, and transformers' implementation does not accept vLLM's "
        "attention.\nUse a model of another architecture."
    )


def _runs_by_transformers(architecture: str) -> bool:
    """Returns True if vLLM can run transformers' implementation, which must accept vLLM's attention."""
    model = getattr(transformers, architecture, None)
    return model is not None and (model.is_backend_compatible() or model._can_set_attn_implementation())


def _not_in_half_precision(config: Any) -> str:
    if config.model_type not in FLOAT16_UNSTABLE:
        return ""
    return f"{config.model_type} is not stable in float16.\nUse --ds.param_dtype bf16 or fp32."


def _linear_attention_without_kernel(config: Any) -> str:
    """Returns the reason why vLLM cannot run a model with linear attention on a CPU in another dtype than
    bf16; "" for other models."""
    layers = getattr(config.get_text_config(), "layer_types", None) or ()
    is_known = any(name.startswith(CPU_BF16_ONLY) for name in config.architectures or ())
    if not (is_known and "linear_attention" in layers):
        return ""
    return "on a CPU its linear attention supports only bf16.\nUse --ds.param_dtype bf16, or a GPU."


def _indivisible_heads(config: Any, tensor_parallel_size: int) -> str:
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads % tensor_parallel_size == 0:
        return ""
    sizes = [str(n) for n in range(1, heads + 1) if heads % n == 0]
    return (
        f"--vllm.tensor_parallel_size {tensor_parallel_size} does not divide its {heads} attention heads.\n"
        f"Use {', '.join(sizes)}."
    )


def _short_rope(config: Any, max_len: int) -> str:
    """Returns the reason if `max_len` exceeds the RoPE table in vLLM, which for some types ends at
    max_position_embeddings although their scaling reaches further; otherwise ""."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or max_len <= limit:
        return ""
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    kind = next((kind for kind in STRETCH if kind in kinds), None)
    if kind is None:
        return ""
    return (
        f"in vLLM its RoPE of type {kind} ends at max_position_embeddings {limit}, and the longest sequence "
        f"has {max_len} tokens.\n{STRETCH[kind]}"
    )


def _head_size_without_kernel(config: Any) -> str:
    size = _head_size(config)
    if size is None or size in CPU_HEAD_SIZES:
        return ""
    sizes = ", ".join(map(str, CPU_HEAD_SIZES))
    return (
        f"its attention heads have size {size}; on a CPU vLLM has kernels for {sizes}.\n"
        "Use a model with such a size (head_dim in its config.json, or hidden_size / num_attention_heads), "
        "or a GPU."
    )


def _head_size(config: Any) -> int | None:
    """Returns the size of attention heads; None if the configuration does not contain it (latent attention,
    state-space models)."""
    if getattr(config, "kv_lora_rank", None) or hasattr(config, "attention_head_dim"):
        return None
    if size := getattr(config, "head_dim", None) or getattr(config, "hidden_size_per_head", None):
        return size
    hidden, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
