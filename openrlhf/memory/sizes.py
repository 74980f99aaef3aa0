"""The sizes of a model from which its memory is estimated."""

from dataclasses import dataclass, replace
from typing import Any, Self

from openrlhf.config.choices import BackendName
from openrlhf.config.sections import DeepSpeedConfig

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per element of each dtype of `--ds.param_dtype`."""

NF4_BYTES = 0.5 + 1 / 64 + 4 / 16384
"""Bytes per weight in NF4 with double quantization (QLoRA, https://arxiv.org/abs/2305.14314, section 3): half
a byte, an 8-bit scale per 64 weights, and a float32 scale per 256 of these scales."""


def trained_item(ds: DeepSpeedConfig, backend: BackendName) -> int:
    """Returns the bytes per element of a trained model's weights. The torch backend keeps float32 weights and
    casts them where layers compute."""
    return 4 if backend == "torch" else ITEM_BYTES[ds.param_dtype]


SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names that configurations have for the cap of a head's logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a model, or of one rank's tensor-parallel shard, that determine a rank's memory."""

    weight_bytes: int
    trainable: int
    """Number of trained parameters."""
    vocabulary: int
    """Number of outputs of the head: 1 for the scalar head of a reward model or critic."""
    layers: int
    hidden: int
    intermediate: int
    """Intermediate size, summed over the experts of a token."""
    queries: int
    """Number of elements of a token's queries over all heads. The output of attention has the same size."""
    keys: int
    """Number of elements of a token's keys over all heads. Values have the same size."""
    normed_heads: bool
    """True if queries and keys are normalized."""
    experts: int = 0
    """Number of experts that compute a token; 0 without experts."""
    tied: bool = False
    """True if the head is the input embedding."""
    softcap: bool = False
    """True if the head caps its logits."""

    @classmethod
    def of(
        cls, config: Any, *, weight_bytes: int, trainable: int, normed_heads: bool, scalar: bool = False
    ) -> Self:
        """Reads the sizes from a model's transformers configuration. `scalar`: the head has one output."""
        first_layer = config.get_text_config().per_layer_config[0]
        most = lambda x: max(x) if isinstance(x, list | tuple) else x  # lists: one value per layer
        number = lambda *names: next(
            (most(x) for name in names if (x := getattr(first_layer, name, None))), 0
        )
        hidden, heads = number("hidden_size"), number("num_attention_heads")
        size = number("head_dim") or hidden // max(heads, 1)
        intermediate = number("moe_intermediate_size", "intermediate_size") or 4 * hidden
        experts = number("num_experts_per_tok") or 0
        return cls(
            weight_bytes=weight_bytes,
            trainable=trainable,
            vocabulary=1 if scalar else number("vocab_size"),
            layers=number("num_hidden_layers"),
            hidden=hidden,
            intermediate=intermediate * max(experts, 1),
            queries=heads * size,
            keys=(number("num_key_value_heads") or heads) * size,
            normed_heads=normed_heads,
            experts=experts,
            tied=not scalar and bool(getattr(config.get_text_config(), "tie_word_embeddings", False)),
            softcap=not scalar and number(*SOFTCAPS) > 0,
        )

    def shard(self, ranks: int) -> Self:
        """Returns the sizes of one of `ranks` tensor-parallel shards. The residual stream is not sharded, and
        a vocabulary only if it divides evenly."""
        whole = self.vocabulary % ranks > 0
        return replace(
            self,
            weight_bytes=self.weight_bytes // ranks,
            trainable=self.trainable // ranks,
            vocabulary=self.vocabulary if whole else self.vocabulary // ranks,
            intermediate=self.intermediate // ranks,
            queries=self.queries // ranks,
            keys=max(1, self.keys // ranks),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Numbers of parameters of a model, and the sizes that determine its activations and its KV cache."""

    path: str
    parameters: int
    trainable: int
    """Parameters that a run without adapters trains."""
    embedding: int
    """Parameters of the input embedding."""
    head: int
    """Parameters of the head; 0 if the head is the input embedding."""
    experts: int
    """Parameters of all experts of all layers."""
    expert_share: float
    """Fraction of its layer's experts that compute a token."""
    linear: int
    """Parameters of all linear layers except the head and experts."""
    adapted: int
    """Sum of inputs and outputs over the layers that get adapters: the parameters of adapters of rank 1."""
    shape: ModelShape
    """Sizes of a layer. `on_rank` sets its weight_bytes and trainable."""

    @property
    def active(self) -> float:
        """Number of parameters that multiply a token: without the input embedding, which is looked up, and
        without experts that do not compute the token."""
        return self.read_by(1)

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
        head = self.shape.hidden
        return replace(
            self,
            parameters=self.parameters - self.head + head,
            trainable=self.trainable - self.head + head,
            head=head,
            shape=replace(self.shape, vocabulary=1),
        )

    def trained(self, ds: DeepSpeedConfig) -> int:
        """Returns the number of trained parameters. With adapters these are theirs and a scalar head's."""
        if not ds.lora.rank:
            return self.trainable
        return self.adapted * ds.lora.rank + self.head * (self.shape.vocabulary == 1)

    def on_rank(self, ds: DeepSpeedConfig, backend: BackendName, *, trained: bool) -> ModelShape:
        """Returns the sizes of one rank's tensor-parallel shard. `trained`: True for a trained model, which
        has the adapters and 4-bit weights that the flags ask for."""
        item = trained_item(ds, backend) if trained else ITEM_BYTES[ds.param_dtype]
        held = self.weight_bytes(item, in_4bit=trained and ds.load_in_4bit)
        held += self.adapted * ds.lora.rank * item * trained
        shape = replace(self.shape, weight_bytes=held, trainable=self.trained(ds) if trained else 0)
        return shape.shard(ds.tensor_parallel_size)
