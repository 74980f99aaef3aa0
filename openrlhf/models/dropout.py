"""What a model does in training and not in evaluation: dropout, skipped layers, noise in front of routers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from openrlhf.device import DEVICE_TYPE
from openrlhf.models.lora import adapter_dropout


def has_noise(config: PreTrainedConfig) -> bool:
    """A model of this configuration would answer differently each time in training mode."""
    values = [config.to_dict()]
    for nested in values:
        values += [value for value in nested.values() if isinstance(value, dict)]
    return any(
        ("drop" in name and value > 0) or "jitter" in name  # PhiMoE's routers draw experts also with 0 of it
        for nested in values
        for name, value in nested.items()
        if isinstance(name, str) and isinstance(value, int | float)
    )


def set_training(module: nn.Module, *, dropout: bool) -> None:
    """Training mode. Without `dropout` a model computes in it what it computes in evaluation, whatever its
    architecture calls its noise; only the dropout of adapters, which has a flag of its own, is on."""
    module.train(dropout)
    if dropout:
        return
    for layer in _checkpointed(module):
        layer.training = True  # by this alone it knows that a backward pass will come
    for noise in adapter_dropout(module):
        noise.train()


def enable_checkpointing(
    model: PreTrainedModel, *, reentrant: bool, dropout: bool, on_host: bool = False
) -> None:
    """Gradient checkpointing that recomputes what `set_training` lets the model compute. `on_host`: from
    inputs that were kept in host memory."""
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in _checkpointed(model):
        checkpoint = layer._gradient_checkpointing_func
        if on_host:
            checkpoint = partial(_from_host, checkpoint)
        if not dropout:
            checkpoint = partial(_as_in_evaluation, layer, checkpoint)
        layer._gradient_checkpointing_func = checkpoint


def _checkpointed(module: nn.Module) -> list[Any]:
    layers = (m for m in module.modules() if isinstance(m, GradientCheckpointingLayer))
    return [layer for layer in layers if layer.gradient_checkpointing]


def _from_host(checkpoint: Callable, forward: Callable, *args: Any) -> Any:
    """`checkpoint(forward, *args)`, which saves its tensor arguments and nothing else; here in host memory,
    where what saves them is on a GPU."""
    with save_on_cpu(pin_memory=DEVICE_TYPE == "cuda"):
        return checkpoint(forward, *args)


def _as_in_evaluation(layer: nn.Module, checkpoint: Callable, forward: Callable, *args: Any) -> Any:
    """`checkpoint(forward, *args)`, in the first pass and in the second without the layer's own dropout."""

    def run(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(run, *args)
