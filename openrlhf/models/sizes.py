"""Counts the parameters of a model, from which its memory is estimated (openrlhf/memory)."""

import math
from functools import cache
from typing import Any, cast

from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from openrlhf.config.supervised import RMConfig
from openrlhf.memory.sizes import NF4_BYTES, ModelShape, ModelSize
from openrlhf.models.configurations import without_weights
from openrlhf.models.tensor_parallel import whole_shape
from openrlhf.models.vision import freeze_vision

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of transformers' configurations with the number of experts of a layer."""


def num_bytes(param: Tensor) -> int:
    """Returns the bytes of the full (unsharded) parameter."""
    return math.prod(whole_shape(param)) * param.element_size()


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Returns the sizes of a model, which may be sharded, quantized or on the meta device."""
    parameters = list(model.parameters())
    scales = lambda p: getattr(p, "quant_state", None) is not None and p.quant_state.shape.numel()
    return ModelShape.of(
        model.config,
        weight_bytes=sum(map(num_bytes, parameters)) + int((NF4_BYTES - 0.5) * sum(map(scales, parameters))),
        trainable=sum(math.prod(whole_shape(p)) for p in parameters if p.requires_grad),
        normed_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        scalar=model.get_output_embeddings() is None,
    )


@cache
def model_size(
    path: str,
    flag: str,
    *,
    images: bool = False,
    adapted: tuple[str, ...] = ("all-linear",),
    frozen_vision: bool = False,
) -> ModelSize:
    """Counts the parameters of a language model on torch's meta device. `adapted`: names of the layers that
    get adapters. `frozen_vision`: see `freeze_vision`. Raises UsageError if the model has no
    configuration."""
    model = without_weights(path, flag, images=images)
    if frozen_vision:
        freeze_vision(model)
    head, embedding = model.get_output_embeddings(), cast(Any, model.get_input_embeddings())
    layers: dict[str, Any] = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, Linear | Conv1D) and layer is not head
    }
    chosen = [
        layer.weight
        for name, layer in layers.items()
        if layer.weight.requires_grad
        and (adapted == ("all-linear",) or any(f".{name}".endswith(f".{last}") for last in adapted))
    ]
    config, shape = model.config.get_text_config(), shape_of(model)
    total = next((n for name in EXPERTS if (n := getattr(config, name, None))), 0)
    is_tied = head is not None and head.weight is embedding.weight
    return ModelSize(
        path=path,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=shape.trainable,
        embedding=embedding.weight.numel(),
        head=0 if head is None or is_tied else head.weight.numel(),
        experts=sum(p.numel() for name, p in model.named_parameters() if ".experts." in name),
        expert_share=(getattr(config, "num_experts_per_tok", None) or 1) / total if total else 1.0,
        linear=sum(layer.weight.numel() for layer in layers.values()),
        adapted=sum(sum(weight.shape) for weight in chosen),
        shape=shape,
    )


def learner_size(config: Any, role: str) -> ModelSize:
    """Returns the size of a model of `config.trained_models`. Raises UsageError if it has no
    configuration."""
    flag, path = config.trained_models[role]
    section = getattr(config, flag.removeprefix("--").partition(".")[0])
    size = model_size(
        path,
        flag,
        images=config.reads_images,
        adapted=config.ds.lora.target_modules,
        frozen_vision=getattr(section, "freeze_visual_encoder", False),
    )
    return size.scorer() if role == "critic" or isinstance(config, RMConfig) else size
