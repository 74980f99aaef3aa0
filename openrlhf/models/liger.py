"""Liger's fused kernels for norms, rotary positions and gated MLPs of a model.

https://github.com/linkedin/Liger-Kernel. Liger's head and losses are not used, because its fused
cross-entropy returns no log-probs of single tokens. Liger replaces methods of modules and functions of the
architecture's file, so models/self_check.py can temporarily restore transformers' own to compare the two.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from openrlhf.errors import ErrorCode, UsageError

ACTIVATIONS = {
    "SwiGLU": F.silu,
    "GEGLU": lambda x: F.gelu(x, approximate="tanh"),
}
"""Activations of Liger's MLPs. The key is a part of the name of the MLP's class."""

_own_functions: dict[str, dict[str, Any]] = {}
"""transformers' functions that Liger has replaced in this process: file -> name -> transformers' function."""


def apply_liger(model: PreTrainedModel) -> None:
    """Replaces the kernels of `model` by Liger's. Raises UsageError if Liger does not support the
    architecture, or computes a different activation."""
    if not torch.cuda.is_available():
        raise _refusal(ErrorCode.RESOURCES, "Liger's kernels run on GPUs, and this process has none")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    file = sys.modules[type(model).__module__]
    before, own = {m: m.__dict__.get("forward") for m in model.modules()}, dict(vars(file))
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
    _keep_own_functions(file, own)
    name = f"{type(model).__name__} ({model.name_or_path})"
    if all(m.__dict__.get("forward") is forward for m, forward in before.items()):
        raise _refusal(ErrorCode.UNSUPPORTED, f"Liger has no kernels for {name}")
    if (activation := _wrong_activation(model)) is not None:
        text = f"{name} has the activation {activation}, and Liger's MLP computes another one"
        raise _refusal(ErrorCode.UNSUPPORTED, text)


def _refusal(code: ErrorCode, reason: str) -> UsageError:
    return UsageError(code, f"{reason}.\nRemove the flag.", flag="--ds.use_liger_kernel")


def _keep_own_functions(file: ModuleType, own: dict[str, Any]) -> None:
    """Restores the classes in `file`, which later models of the process would otherwise use, and records its
    own functions. `own`: all names in the file before Liger's changes. Liger's functions stay in place,
    because modules look them up in the file when they are called."""
    for name, value in own.items():
        if getattr(file, name) is value:
            continue
        if isinstance(value, type):
            setattr(file, name, value)
        else:
            _own_functions.setdefault(file.__name__, {}).setdefault(name, value)


def _wrong_activation(model: PreTrainedModel) -> str | None:
    x = torch.linspace(-3, 3, 13)
    for module in model.modules():
        for part, computed in ACTIVATIONS.items():
            own = getattr(module, "act_fn", None)
            if part in module._get_name() and own is not None and not torch.allclose(own(x), computed(x)):
                return type(own).__name__
    return None


@contextmanager
def transformers_kernels(model: PreTrainedModel) -> Iterator[None]:
    """Restores transformers' own kernels of the model within the context."""
    file = sys.modules[type(model).__module__]
    liger = {m: m.__dict__.pop("forward") for m in model.modules() if _is_liger(m.__dict__.get("forward"))}
    functions = {name: getattr(file, name) for name in _own_functions.get(file.__name__, {})}
    vars(file).update(_own_functions.get(file.__name__, {}))
    try:
        yield
    finally:
        vars(file).update(functions)
        for module, forward in liger.items():
            module.__dict__["forward"] = forward


def _is_liger(method: Any) -> bool:
    return getattr(method, "__module__", "").partition(".")[0] == "liger_kernel"
