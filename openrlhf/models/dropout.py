"""Controls a model's randomness in training: dropout, skipped layers, noise in routers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from openrlhf.device import DEVICE_TYPE


def has_noise(config: PreTrainedConfig) -> bool:
    """Returns True if the outputs of a model with this configuration are random in training mode."""
    values = [config.to_dict()]
    for nested in values:
        values += [value for value in nested.values() if isinstance(value, dict)]
    return any(
        ("drop" in name and value > 0) or "jitter" in name  # PhiMoE's routers are random even with jitter 0
        for nested in values
        for name, value in nested.items()
        if isinstance(name, str) and isinstance(value, int | float)
    )


def set_training(module: nn.Module, *, dropout: bool) -> None:
    """Switches `module` to training mode. Without `dropout` it computes the same as in evaluation mode,
    except for the dropout of adapters, which has its own flag."""
    module.train(dropout)
    if dropout:
        return
    for layer in _checkpointed(module):
        layer.training = True  # the layer checkpoints only if this is set
    for noise in _adapter_dropout(module):
        noise.train()


def is_noisy(module: nn.Module, *, has_noise: bool) -> bool:
    """Returns whether the next pass of `module` answers differently each time. `has_noise`: of its
    configuration."""
    return (module.training and has_noise) or any(child.training for child in _noisy_adapters(module))


def has_adapter_dropout(module: nn.Module) -> bool:
    """Returns whether adapters of `module` have dropout in training."""
    return bool(_noisy_adapters(module))


def enable_checkpointing(
    model: PreTrainedModel, *, reentrant: bool, dropout: bool, on_host: bool = False
) -> None:
    """Enables gradient checkpointing whose recomputation respects `set_training`. `on_host`: keep the saved
    inputs in host memory."""
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in _checkpointed(model):
        checkpoint = layer._gradient_checkpointing_func
        if on_host:
            checkpoint = partial(_from_host, checkpoint)
        if not dropout:
            checkpoint = partial(_as_in_evaluation, layer, checkpoint)
        layer._gradient_checkpointing_func = checkpoint


def _noisy_adapters(module: nn.Module) -> list[nn.Dropout]:
    return [
        child
        for noise in _adapter_dropout(module)
        for child in noise.modules()
        if isinstance(child, nn.Dropout) and child.p > 0
    ]


def _adapter_dropout(module: nn.Module) -> list[nn.Module]:
    """Returns the dropout modules in front of the adapters, if any."""
    return [child for name, child in module.named_modules() if name.endswith(".lora_dropout")]


def _checkpointed(module: nn.Module) -> list[Any]:
    layers = (m for m in module.modules() if isinstance(m, GradientCheckpointingLayer))
    return [layer for layer in layers if layer.gradient_checkpointing]


def _from_host(checkpoint: Callable, forward: Callable, *args: Any) -> Any:
    """Calls `checkpoint(forward, *args)` and keeps the tensors that it saves, its arguments, in host memory
    (pinned on CUDA)."""
    with save_on_cpu(pin_memory=DEVICE_TYPE == "cuda"):
        return checkpoint(forward, *args)


def _as_in_evaluation(layer: nn.Module, checkpoint: Callable, forward: Callable, *args: Any) -> Any:
    """Calls `checkpoint(forward, *args)` with the layer's own dropout disabled, in the first pass and in the
    recomputation."""

    def run(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(run, *args)
