"""Merges a LoRA adapter into its base model: `openrlhf lora_combiner`."""

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, load_peft_weights
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from openrlhf.api import (
    CLASSIFIER_HEAD,
    DTYPES,
    GENERATION,
    OF_FILES,
    AdapterMerge,
    ErrorCode,
    LoraCombinerConfig,
    UsageError,
    check_loaded,
    check_model,
    check_saving,
    exporting,
    first_line,
    load_config,
    load_statistics,
    load_tokenizer,
    notify,
    padding_token_id,
    register_classifier,
    save_model,
    saved_reader,
    untie_config,
    waiting,
)
from openrlhf.api import loading_model as loading


def run(config: LoraCombinerConfig) -> None:
    """Writes W + (alpha / rank) B A for every adapted layer, and the base model's other weights."""
    check_model(config.model_path, "--model_path")
    trained_on = _check_adapter(config)
    tokenizer_path, flag = _tokenizer_home(config)
    of_base, tokenizer = load_config(config.model_path, ""), load_tokenizer(tokenizer_path, flag=flag)
    may_read = type(of_base) in AutoModelForImageTextToText._model_mapping
    auto_class = _class_of(config, of_base, may_read)
    images = may_read and auto_class is not AutoModelForCausalLM
    reader = saved_reader(tokenizer, config.model_path, images=images)
    check_saving(config.model_path, "--model_path", reader)
    with waiting("loading and merging the model", key=config.model_path):
        model = _merge(config, trained_on, auto_class)
    if config.is_rm:
        tokenizer.pad_token_id = model.config.pad_token_id = padding_token_id(tokenizer, of_base)
        for name, value in load_statistics(config.lora_path).items():
            setattr(model.config, name, value)
    with exporting(config.output_path) as made:
        save_model(model, made, model.state_dict())
        reader.save_pretrained(made)
        if (ends := Path(config.lora_path, GENERATION)).exists():  # the adapter has learned others
            shutil.copyfile(ends, Path(made, GENERATION))
    print(f"merged model saved to {config.output_path}", flush=True)


def _check_adapter(config: LoraCombinerConfig) -> str:
    """Returns the name of the base model that the adapter was trained on. Prints a note if it is not
    --model_path. Raises UsageError if there is no adapter, if it belongs to another kind of model, or if the
    rank of its weights is not that of its configuration."""
    try:
        adapter = PeftConfig.from_pretrained(config.lora_path)
    except (OSError, ValueError) as error:
        raise _wrong_adapter(
            config, "has no adapter_config.json; give the folder of a LoRA adapter"
        ) from error
    if (kind := str(adapter.peft_type).rpartition(".")[2]) != "LORA":
        raise _wrong_adapter(config, f"is an adapter of the type {kind}; only LoRA has weights to merge")
    if (adapter.task_type == "SEQ_CLS") != config.is_rm:
        kind, remedy = ("language", "remove") if config.is_rm else ("reward", "add")
        raise _wrong_adapter(config, f"is the adapter of a {kind} model; {remedy} --is_rm")
    _check_rank(config, adapter)
    trained_on = str(adapter.base_model_name_or_path)
    if trained_on != config.model_path and Path(trained_on).resolve() != Path(config.model_path).resolve():
        notify(
            f"note: --lora_path {config.lora_path} was trained on {trained_on}, and is merged into "
            f"--model_path {config.model_path}"
        )
    return trained_on


def _check_rank(config: LoraCombinerConfig, adapter: Any) -> None:
    try:
        weights = load_peft_weights(config.lora_path, device="cpu")
    except Exception as error:  # a damaged pickle can raise any error
        raise _wrong_adapter(config, f"its weights cannot be read: {first_line(error)}") from error
    if getattr(adapter, "rank_pattern", None) or getattr(adapter, "target_parameters", None):
        return  # layers have different ranks, and experts share a weight
    for name, weight in weights.items():
        if ".lora_A." in name and len(weight) != adapter.r:
            raise _wrong_adapter(
                config,
                f"adapter_config.json has rank {adapter.r}, and {name} has rank {len(weight)}.\n"
                "The two files belong to different adapters.",
            )


def _class_of(config: LoraCombinerConfig, of_base: PreTrainedConfig, may_read: bool) -> Any:
    """Returns the class of transformers whose models have the adapter's layers. `may_read`: whether the
    architecture has one that reads images, perhaps beside one for text alone."""
    if config.is_rm and may_read:
        register_classifier(of_base)
    if config.is_rm or not may_read:
        return AutoModelForSequenceClassification if config.is_rm else AutoModelForCausalLM
    if type(of_base) in AutoModelForCausalLM._model_mapping:
        with torch.device("meta"):
            text = AutoModelForCausalLM.from_config(of_base, trust_remote_code=False)
        names = load_peft_weights(config.lora_path, device="cpu")
        adapted = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
        if adapted <= {f"base_model.model.{name}" for name, _ in text.named_modules()}:
            return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _merge(config: LoraCombinerConfig, trained_on: str, auto_class: Any) -> PreTrainedModel:
    dtype = DTYPES[config.ds.param_dtype]
    more: dict[str, Any] = {"num_labels": 1} if config.is_rm else {}
    more |= {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with loading("weights", config.model_path, "--model_path", OF_FILES):
        base, info = auto_class.from_pretrained(config.model_path, trust_remote_code=False, **more)
    new = f"{CLASSIFIER_HEAD}." if config.is_rm else None  # the adapter has it
    check_loaded(info, config.model_path, "--model_path", new=new)
    untie_config(base, config.model_path)
    if config.is_rm:
        base.config.value_head_prefix = CLASSIFIER_HEAD  # name of the head in the adapter
    try:
        model = PeftModel.from_pretrained(base, config.lora_path)
    except (RuntimeError, ValueError) as error:
        raise _other_base(config, trained_on, str(error).strip().splitlines()[-1].strip()) from error
    saved, known = load_peft_weights(config.lora_path, device="cpu"), get_peft_model_state_dict(model)
    if unknown := sorted(saved.keys() - known):
        raise _other_base(config, trained_on, f"The base model has no layer for {unknown[0]}.")
    _untie(base)
    try:
        left = merge_rounded(model).fraction
    except (AttributeError, RuntimeError) as error:
        raise _wrong_adapter(config, f"peft cannot merge it: {first_line(error)}") from error
    if left is not None and left < 0.9:
        notify(
            f"warning: {left:.0%} of the adapter's change is left after rounding to {str(base.dtype)[6:]}. "
            "--ds.param_dtype fp32 keeps all of it."
        )
    return model.unload()


@torch.no_grad()
def merge_rounded(model: nn.Module) -> AdapterMerge:
    """Merges peft's adapters into the layers below them, in float32, and rounds to the layers' dtypes."""
    merge = AdapterMerge()
    for layer in (module for module in model.modules() if isinstance(module, BaseTunerLayer)):
        weight: Any = getattr(layer.get_base_layer(), "weight", None)
        if weight is None:  # adapted parameters of experts
            layer.merge()
            continue
        base, weight.data = weight.data, weight.data.to(torch.float32, copy=True)
        layer.merge()
        whole = weight.data
        weight.data = whole.to(base.dtype)
        merge.add(base, weight.data, whole - base.float())
    return merge


def _untie(base: PreTrainedModel) -> None:
    """Unties head and embedding if only one of them is adapted, because merging would change both."""
    layers: list[Any] = [base.get_output_embeddings(), base.get_input_embeddings()]
    adapted = [layer for layer in layers if isinstance(layer, BaseTunerLayer)]
    if adapted and layers[0].weight is layers[1].weight:
        own = getattr(layers[0], "base_layer", layers[0])
        own.weight = nn.Parameter(own.weight.clone())
        base.config.tie_word_embeddings = base.config.get_text_config().tie_word_embeddings = False


def _other_base(config: LoraCombinerConfig, trained_on: str, reason: str) -> UsageError:
    text = f"does not fit --model_path {config.model_path}.\nIt was trained on {trained_on}.\n{reason}"
    return _wrong_adapter(config, text)


def _wrong_adapter(config: LoraCombinerConfig, text: str) -> UsageError:
    return UsageError(ErrorCode.INVALID_MODEL, text, flag="--lora_path", value=config.lora_path)


def _tokenizer_home(config: LoraCombinerConfig) -> tuple[str, str]:
    """Returns the path and its flag: the adapter's folder if it has a tokenizer, else the base model's."""
    beside = cached_file(
        config.lora_path, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False
    )
    return (config.lora_path, "--lora_path") if beside else (config.model_path, "--model_path")
