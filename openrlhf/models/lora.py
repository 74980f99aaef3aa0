"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) by peft, inside the Hugging Face model itself.

A linear layer W becomes W + (alpha / rank) B A, of which only A (rank, in) and B (out, rank) are trained. The
model keeps its class, and parameters outside of adapted layers keep their names. Adapters have the model's
dtype, because DeepSpeed casts a whole model to one dtype. In half precision its optimizer keeps float32
master weights of the trained parameters, so small updates are not lost.
"""

import difflib
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from openrlhf.config.sections import DeepSpeedConfig, LoraConfig
from openrlhf.errors import ErrorCode, RunError, UsageError
from openrlhf.models.checkpoint_layout import CLASSIFIER_HEAD, checkpoint_tensors, head_name
from openrlhf.models.configurations import without_weights
from openrlhf.models.policy import get_head
from openrlhf.models.tensor_parallel import laid_out_as, whole, whole_shape
from openrlhf.models.vision import is_frozen

ALL_LINEAR = "all-linear"
"""Value of `--ds.lora.target_modules` that selects every linear layer except the head."""

ADAPTER = "default"
"""peft's name of the model's only adapter."""

STATISTICS_FILE = "reward_statistics.json"
"""File beside a reward model's adapter with the mean and standard deviation of its scores, which a full model
keeps in config.json. A config.json beside an adapter would make transformers take the folder for a full
model."""


def prepare_for_training(model: PreTrainedModel, ds: DeepSpeedConfig) -> PreTrainedModel:
    """Prepares a loaded model for training: adds adapters if `ds.lora.rank` is positive. With adapters the
    head of a sequence classifier is trained in full, and every other weight is frozen."""
    if ds.lora.rank > 0:
        _add_adapters(model, ds.lora)
    return model


def has_adapters(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "peft_config", None))


@contextmanager
def disabled_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Disables a language model's adapters within the context, so that it computes like the base model.
    Gradients must be disabled."""
    layers = _adapted_layers(model)
    assert layers and not torch.is_grad_enabled()
    # Not `enable_adapters`, which sets requires_grad: fully_shard has two tensors for each parameter, of
    # which it would change only one.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@dataclass(eq=False)
class Merge:
    """The fraction of the adapters' change left by rounding: <merged - base, change> / <change, change>."""

    wanted: Tensor | float = 0.0
    kept: Tensor | float = 0.0

    def add(self, base: Tensor, merged: Tensor, change: Tensor) -> None:
        """Adds a layer. `change`: B A (alpha / rank) in float32."""
        self.wanted = self.wanted + change.pow(2).sum()
        self.kept = self.kept + ((merged.float() - base.float()) * change).sum()

    @property
    def fraction(self) -> float | None:
        """None if the adapters change nothing."""
        return float(self.kept / self.wanted) if self.wanted else None


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A weight of the model without adapters, and the tensors of this model from which it is computed."""

    stored: Tensor
    layer: Any = None
    """The adapted layer of this weight; None if no adapter applies."""
    is_transposed: bool = False
    """True for a 4-bit weight of a `Conv1D`, which bitsandbytes stores as that of a linear layer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Full (unsharded, dequantized) shape."""
        state = getattr(self.stored, "quant_state", None)
        shape = whole_shape(self.stored) if state is None else tuple(state.shape)
        return shape[::-1] if self.is_transposed else shape

    @property
    def dtype(self) -> torch.dtype:
        state = getattr(self.stored, "quant_state", None)
        return self.stored.dtype if state is None else state.dtype

    @property
    def parts(self) -> list[Tensor]:
        """The tensors from which the weight is computed: the stored one, and the adapter's A and B."""
        if self.layer is None:
            return [self.stored]
        return [self.stored, self.layer.lora_A[ADAPTER].weight, self.layer.lora_B[ADAPTER].weight]

    def merged(self, merge: Merge | None = None) -> Tensor:
        """Returns the full weight, with the adapter merged in float32 and then rounded. `parts` must be
        gathered. Collective under tensor parallelism. `merge`: counts what the rounding leaves."""
        weight = self._dequantized()
        if self.layer is not None:
            a, b = (part.weight.float() for part in (self.layer.lora_A[ADAPTER], self.layer.lora_B[ADAPTER]))
            change = whole((b @ a) * self.layer.scaling[ADAPTER])
            change = change.T if self.layer.fan_in_fan_out else change
            base, weight = weight, (weight.float() + change).to(weight.dtype)
            if merge is not None:
                merge.add(base, weight, change)
        return weight.T.contiguous() if self.is_transposed else weight

    def _dequantized(self) -> Tensor:
        """Returns the full stored weight; a 4-bit weight in the dtype from which it was quantized."""
        if (state := getattr(self.stored, "quant_state", None)) is None:
            return whole(self.stored)
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.stored.data, state)


def merged_weights(model: PreTrainedModel) -> dict[str, Weight]:
    """Returns every tensor of the model's checkpoint, with adapters merged into the layers below them."""
    layers = dict(model.named_modules())
    found = {}
    for name, tensor in checkpoint_tensors(model).items():
        if ".lora_" in name:
            continue
        owner, below, kind = name.rpartition(".base_layer.")
        found[f"{owner}.{kind}" if below else name] = Weight(
            tensor,
            layers[owner] if below and kind == "weight" else None,
            hasattr(tensor, "quant_state")
            and getattr(layers[name.rpartition(".")[0]], "source_cls", None) is Conv1D,
        )
    return found


def base_weights(model: PreTrainedModel) -> dict[str, Weight]:
    """Returns every tensor of the model's checkpoint without the adapters."""
    return {name: replace(weight, layer=None) for name, weight in merged_weights(model).items()}


def adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the adapters' parameters by peft's names."""
    return {_name_on_disk(model, name): p for name, p in model.named_parameters() if ".lora_" in name}


@torch.no_grad()
def fill_randomly(adapters: Mapping[str, Tensor], lora: LoraConfig, seed: int) -> None:
    """Overwrites `adapter_weights` with normal random numbers, which depend only on name and seed, so that
    all ranks have the same. The output of an adapter has about half the size of its layer's input."""
    for name, param in adapters.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
        size = 1.0 if ".lora_A." in name else 0.5 * lora.rank / lora.alpha
        values = torch.randn(param.shape, generator=generator) * size / math.sqrt(param.shape[1])
        param.copy_(laid_out_as(param, values))


def adapted_layers(path: str, flag: str, lora: LoraConfig) -> tuple[str, ...]:
    """Returns the last part of the names of layers that get an adapter in the language model at `path`.
    Raises UsageError for a name of `lora.target_modules` that matches no layer."""
    model = without_weights(path, flag, images=False)
    return tuple(sorted({name.rpartition(".")[2] for name in _targets(model, lora.target_modules)}))


def save_adapter(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: str | Path) -> None:
    """Writes `weights`, the trained parameters by their names in `model`, as an adapter that peft and
    transformers load. The head of a sequence classifier is stored as `score`, transformers' name. Raises
    RunError unless the adapter has the weights that peft looks for."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {_name_on_disk(model, name): weight.contiguous() for name, weight in weights.items()}
    _check_whole(model, tensors)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(str(path))
    statistics = {key: getattr(model.config, key) for key in ("mean", "std") if hasattr(model.config, key)}
    if statistics:
        (path / STATISTICS_FILE).write_text(json.dumps(statistics) + "\n", encoding="utf-8")


def _check_whole(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    layers = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    expected = {f"base_model.model.{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    found = {name for name in tensors if ".lora_" in name}
    if wrong := sorted(expected ^ found):
        reason = "has no layer for" if wrong[0] in found else "lacks the weight"
        text = (
            f"the adapter {reason} {wrong[0]} ({len(wrong)} such weights), so peft would not load it.\n"
            "This is a bug in openrlhf: please report it with this message and the name of the model."
        )
        raise RunError(ErrorCode.BROKEN_INVARIANT, text)


def load_statistics(folder: str | Path) -> dict[str, float]:
    """Returns the `mean` and `std` of a reward model's scores that `save_adapter` stored, or an empty
    dict."""
    path = Path(folder) / STATISTICS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _adapted_layers(model: nn.Module) -> list[Any]:
    kind = _library().tuners.tuners_utils.BaseTunerLayer
    return [module for module in model.modules() if isinstance(module, kind)]


def _library():
    """Imports peft, which takes seconds. Most runs have no adapters."""
    import peft

    return peft


def _add_adapters(model: PreTrainedModel, lora: LoraConfig) -> None:
    peft = _library()
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_targets(model, lora.target_modules),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type=peft.TaskType.SEQ_CLS if is_classifier(model) else peft.TaskType.CAUSAL_LM,
    )
    # Forks the random state, so that adapters start equal at every ZeRO stage, whose loading draws different
    # numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        model.add_adapter(config, ADAPTER)
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(model.dtype)
    if is_classifier(model):
        # Set after `add_adapter`, because peft would wrap the head and train a copy of it.
        config.modules_to_save = [CLASSIFIER_HEAD]
        _head(model).requires_grad_(True)


def _targets(model: PreTrainedModel, wanted: tuple[str, ...]) -> list[str]:
    """Returns names, or last parts of names, of the layers that get an adapter: no frozen ones, and none of
    another kind of the same name, such as a block `0` beside a layer `0`."""
    head, layers = _head(model), dict(model.named_modules())
    is_adapted = lambda m: isinstance(m, (nn.Linear, Conv1D)) and m is not head and not is_frozen(m.weight)
    linear = {name for name, module in layers.items() if is_adapted(module)}
    last_names = sorted({name.rpartition(".")[2] for name in linear})
    if last_names and wanted == (ALL_LINEAR,):
        wanted = tuple(last_names)
    targets: list[str] = []
    for name in wanted:
        meant = {known for known in layers if f".{known}".endswith(f".{name}")}
        targets += [name] if meant <= linear else sorted(meant & linear)
        if not meant & linear:
            near = difflib.get_close_matches(name, last_names, n=3) or last_names
            text = "names no linear layer (head and frozen parts get no adapter).\n"
            text += (
                f"Use {ALL_LINEAR}, or names like {', '.join(near)}."
                if near
                else f"A {type(model).__name__} has none: train all of its weights (--ds.lora.rank 0)."
            )
            raise UsageError(ErrorCode.INVALID_VALUE, text, flag="--ds.lora.target_modules", value=name)
    return targets


def is_classifier(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings() is None


def _head(model: PreTrainedModel) -> nn.Module:
    return model.get_submodule(head_name(model.config)) if is_classifier(model) else get_head(model)


def _name_on_disk(model: PreTrainedModel, name: str) -> str:
    """Returns peft's name of a parameter."""
    own_head = f"{head_name(model.config)}."
    if is_classifier(model) and name.startswith(own_head):
        name = f"{CLASSIFIER_HEAD}.{name.removeprefix(own_head)}"
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"
