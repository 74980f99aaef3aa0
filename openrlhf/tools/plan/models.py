"""Reads the sizes of a model from its configuration, without weights."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from torch.nn import Linear
from transformers.pytorch_utils import Conv1D

from openrlhf.api import ITEM_BYTES, DeepSpeedConfig, ModelShape, without_weights

NF4_BYTES = 0.5 + 1 / 64 + 4 / 16384
"""Bytes per weight in NF4 with double quantization (QLoRA, https://arxiv.org/abs/2305.14314, section 3): half
a byte, an 8-bit scale per 64 weights, and a float32 scale per 256 of these scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Numbers of parameters of a model, and the sizes that determine its activations and its KV cache."""

    path: str
    parameters: int
    embedding: int
    """Parameters of the input embedding."""
    head: int
    """Parameters of the head over the vocabulary; 0 if the head is the input embedding."""
    experts: int
    """Parameters of all experts of all layers."""
    expert_share: float
    """Fraction of its layer's experts that compute a token."""
    linear: int
    """Parameters of all linear layers except the head and experts."""
    adapted: int
    """Sum of inputs and outputs over the layers that get adapters: the parameters of adapters of rank 1."""
    shape: ModelShape
    """Sizes of a layer. `shape_of_rank` sets its weight_bytes and trainable."""

    @property
    def active(self) -> float:
        """Number of parameters that multiply a token: without the input embedding, which is looked up, and
        without experts that do not compute the token."""
        idle = self.experts * (1 - self.expert_share)
        return self.parameters - (self.embedding if self.head else 0) - idle

    def read_by(self, tokens: float) -> float:
        """Returns the number of parameters that a pass over `tokens` tokens reads.

        If routers choose evenly, an expert that computes the fraction s of tokens is idle for all n tokens
        with probability (1 - s)^n."""
        idle = self.experts * (1 - self.expert_share) ** tokens
        return self.parameters - (self.embedding if self.head else 0) - idle

    def kv_bytes(self, item: int) -> int:
        """Returns the bytes of a token's keys and values in all layers: 2 L K elements of `item` bytes."""
        return 2 * self.shape.layers * self.shape.keys * item

    def weight_bytes(self, item: int, *, in_4bit: bool = False) -> int:
        if not in_4bit:
            return self.parameters * item
        return int(self.linear * NF4_BYTES) + (self.parameters - self.linear) * item

    def scorer(self) -> "ModelSize":
        """Returns the size of this model with a scalar head instead of the head over the vocabulary."""
        return replace(
            self,
            parameters=self.parameters - self.head,
            head=0,
            shape=replace(self.shape, vocabulary=1),
        )

    def shape_of_rank(self, ds: DeepSpeedConfig, *, trained: bool) -> ModelShape:
        """Returns the sizes of one rank's tensor-parallel shard, from which its memory follows. `trained`:
        True for a trained model, which has the adapters and 4-bit weights that the flags ask for."""
        item, ranks = ITEM_BYTES[ds.param_dtype], ds.tensor_parallel_size
        adapters = self.adapted * ds.lora.rank if trained else 0
        in_4bit = trained and ds.load_in_4bit
        return replace(
            self.shape,
            weight_bytes=(self.weight_bytes(item, in_4bit=in_4bit) + adapters * item) // ranks,
            trainable=((adapters or self.parameters) if trained else 0) // ranks,
            queries=self.shape.queries // ranks,
            keys=max(1, self.shape.keys // ranks),
            intermediate=self.shape.intermediate // ranks,
        )


@cache
def model_size(
    path: str, flag: str, *, images: bool = False, adapted: tuple[str, ...] = ("all-linear",)
) -> ModelSize:
    """Builds the model on torch's meta device and counts its parameters. `adapted`: names of the layers that
    get adapters. Raises UsageError if the model has no configuration."""
    model = without_weights(path, flag, images=images)
    head, embedding = model.get_output_embeddings(), cast(Any, model.get_input_embeddings())
    layers: dict[str, Any] = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, Linear | Conv1D) and layer is not head
    }
    chosen = [
        layer.weight
        for name, layer in layers.items()
        if adapted == ("all-linear",) or name.rpartition(".")[2] in adapted
    ]
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    config = model.config.get_text_config()
    total = next((n for name in EXPERTS if (n := getattr(config, name, None))), 0)
    is_tied = head is not None and head.weight is embedding.weight
    return ModelSize(
        path=path,
        parameters=sum(p.numel() for p in model.parameters()),
        embedding=embedding.weight.numel(),
        head=0 if head is None or is_tied else head.weight.numel(),
        experts=experts,
        expert_share=(getattr(config, "num_experts_per_tok", None) or 1) / total if total else 1.0,
        linear=sum(layer.weight.numel() for layer in layers.values()),
        adapted=sum(sum(weight.shape) for weight in chosen),
        shape=ModelShape.of(
            model.config,
            weight_bytes=0,
            trainable=0,
            normed_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        ),
    )


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of transformers' configurations with the number of experts of a layer."""
