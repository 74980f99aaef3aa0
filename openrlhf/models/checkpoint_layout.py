"""Conversion of a model's weights to the names and shapes of its Hugging Face checkpoint.

transformers renames, fuses and splits weights when it loads them, and `save_pretrained` reverts this. This
module reverts it for a few tensors at a time, or for shapes only, so that a weight sync can send an engine
the same tensors that the engine would read from disk.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

CLASSIFIER_HEAD = "score"
"""Name of the head of transformers' sequence classifiers."""


def head_name(config: PreTrainedConfig) -> str:
    """Returns the name of the head of a model that scores."""
    return getattr(config, "value_head_prefix", None) or CLASSIFIER_HEAD


@dataclass(kw_only=True, slots=True)
class Conversion:
    """Tensors of a model that are converted together to tensors of its checkpoint."""

    name: str
    """Name in the checkpoint; if there are several, the first."""
    converter: WeightConverter | None
    """transformers' converter; None if at most the name changes."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of (name in the model, pattern of the converter that it matches)."""

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.sources]


class CheckpointLayout:
    """The layout of a model's checkpoint."""

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Builds the layout. `shapes` maps every tensor of the model that a checkpoint holds
        (`checkpoint_tensors`) to its full (unsharded) shape."""
        self.config = model.config
        # The only method of a model that transformers' converters call.
        parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        self.model = SimpleNamespace(get_parameter=parameters.__getitem__)
        self.conversions = _conversions(model, sorted(shapes, key=dot_natural_key))

    def convert(self, conversion: Conversion, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the checkpoint's tensors by name, made from `conversion.names` of the model's `tensors`.
        Copies tensors only if the layout changes."""
        if conversion.converter is None:
            return {conversion.name: tensors[conversion.names[0]]}
        converter: Any = deepcopy(conversion.converter)  # its types cover loading only
        for name, pattern in conversion.sources:
            converter.add_tensor(conversion.name, name, pattern, tensors[name])
        converted = converter.convert(conversion.name, model=self.model, config=self.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in converted.items()}


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the parameters and persistent buffers that a checkpoint contains, by name. Tied weights appear
    once."""
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    origin = model.all_tied_weights_keys
    saved = {n: p for n, p in parameters.items() if n not in origin or parameters.get(origin[n]) is not p}
    saved |= {n: buffers[n] for n in model.state_dict() if n in buffers}
    ignored = model._keys_to_ignore_on_save or ()
    return {name: tensor for name, tensor in saved.items() if name not in ignored}


def forget_unused_conversions(model: PreTrainedModel) -> None:
    """Removes the conversions that transformers did not apply when it loaded this model. Under ZeRO-3
    transformers records all possible ones, with which weights would get names that the checkpoint does not
    have."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        used = [c for c in conversions if c.was_used()]
        setattr(model, "_weight_conversions", used)  # noqa: B010  transformers keeps them there


def _conversions(model: PreTrainedModel, names: list[str]) -> list[Conversion]:
    back = [transform.reverse_transform() for transform in reversed(_done_on_load(model))]
    renamings = [t for t in back if isinstance(t, WeightRenaming)]
    converters = [t for t in back if isinstance(t, WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    found: dict[str, Conversion] = {}
    for name in names:
        renamed, pattern = rename_source_key(name, renamings, converters, reverse=True)
        converter = None if pattern is None else of_pattern[pattern]
        conversion = found.setdefault(renamed, Conversion(name=renamed, converter=converter))
        conversion.sources.append((name, pattern or name))
    return list(found.values())


def _done_on_load(model: PreTrainedModel) -> list[WeightTransform]:
    """Returns the conversions that were applied on load, as `save_pretrained` determines them."""
    done = getattr(model, "_weight_conversions", None)
    if done is not None:
        return done
    # The model was created from its configuration: whether its checkpoints have a prefix is unknown.
    possible = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in possible if not isinstance(transform, PrefixChange)]
