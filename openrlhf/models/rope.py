"""Rotary frequencies that do not depend on the other tokens of a row."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

BY_LENGTH = ("dynamic", "longrope")
"""RoPE types whose frequencies transformers recomputes from the largest position of each call."""


def fix_frequencies(model: PreTrainedModel, max_len: int | None) -> None:
    """Fixes the frequencies of all rotary embeddings of `model` to those of a sequence of `max_len` tokens,
    as vLLM does with `max_model_len`. None: to their initial values."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            for layer_type in [name for name, kind in kinds.items() if kind in BY_LENGTH]:
                _fix(module, f"{layer_type}_", kinds[layer_type], max_len, layer_type=layer_type)
                kinds[layer_type] = _FIXED
        elif kinds in BY_LENGTH:
            _fix(module, "", kinds, max_len)
            module.__dict__["rope_type"] = _FIXED


_FIXED = "fixed"
"""A RoPE type that transformers does not know and therefore does not update."""


def _fix(module: nn.Module, prefix: str, kind: str, max_len: int | None, **layer: Any) -> None:
    if max_len is not None:
        old = getattr(module, f"{prefix}inv_freq")
        new, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=max_len, **layer)
        module.register_buffer(f"{prefix}inv_freq", new, persistent=False)
        setattr(module, f"{prefix}attention_scaling", scaling)
