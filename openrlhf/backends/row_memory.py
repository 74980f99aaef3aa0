"""How much memory a rank needs to train on a row, told before the first one comes.

Counted is what the passes keep of a decoder with gated MLPs, which other architectures come near; not what
libraries take of every process (0.5 to 1 GB), nor how an allocator fragments.
"""

from dataclasses import astuple, dataclass
from typing import Any, Self

from openrlhf.algorithms.logprobs import logits_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What the memory of a model depends on."""

    weight_bytes: int
    trainable: int
    """Parameters."""
    vocabulary: int
    layers: int
    hidden: int
    intermediate: int
    """Of all experts that a token visits."""
    queries: int
    """Numbers of a token's queries, all heads together; as many as of what attention answers."""
    keys: int
    """The same of keys, and of values."""
    normed_heads: bool
    """Queries and keys have norms."""

    @classmethod
    def of(cls, config: Any, *, weight_bytes: int, trainable: int, normed_heads: bool) -> Self:
        """`config`: of a model of transformers."""
        first_layer = config.get_text_config().per_layer_config[0]
        most = lambda x: max(x) if isinstance(x, list | tuple) else x  # one for each layer
        number = lambda *names: next(
            (most(x) for name in names if (x := getattr(first_layer, name, None))), 0
        )
        hidden, heads = number("hidden_size"), number("num_attention_heads")
        size = number("head_dim") or hidden // max(heads, 1)
        intermediate = number("moe_intermediate_size", "intermediate_size") or 4 * hidden
        return cls(
            weight_bytes=weight_bytes,
            trainable=trainable,
            vocabulary=number("vocab_size"),
            layers=number("num_hidden_layers"),
            hidden=hidden,
            intermediate=intermediate * max(number("num_experts_per_tok"), 1),
            queries=heads * size,
            keys=(number("num_key_value_heads") or heads) * size,
            normed_heads=normed_heads,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMemory:
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __str__(self) -> str:
        unit, size = ("GB", 2**30) if self.total >= 2**30 else ("MB", 2**20)
        parts = {name: getattr(self, name) / size for name in self.__slots__}
        listed = ", ".join(f"{name} {count:.1f}" for name, count in parts.items())
        return f"{self.total / size:.1f} {unit} ({listed})"


def most_tokens(train: Any, longest: int, sharing: int) -> int:
    """Of a row, by the flags `train.*`. `longest`: tokens of an item; `sharing`: ranks that share a row."""
    if train.dynamic_batch_enable:
        return max(longest, train.max_tokens_per_gpu * sharing)
    return longest * train.micro_batch_size


def layer_bytes(shape: ModelShape, size: int) -> int:
    """What a layer keeps of a token for its backward pass: `size` bytes a number, but norms in float32."""
    norms = 2 * shape.hidden * (4 + 2 * size)  # their input, what was normed, and that by their weight
    heads = (shape.queries + shape.keys) * (4 + size) if shape.normed_heads else 0
    attention = (3 * shape.queries + 2 * shape.keys) * size  # what it answers also as it is projected
    mlp = 4 * shape.intermediate * size  # gate, its activation, what it opens, the product
    return norms + heads + attention + mlp


def activations(
    shape: ModelShape, tokens: int, size: int, checkpointing: bool, gpu: int | None, *, on_host: bool
) -> int:
    """Kept by all layers, and what the last pass adds: a layer that is computed again, or the head."""
    layer = layer_bytes(shape, size)
    again = 3 * shape.intermediate * size  # gradients of an MLP while all else of its layer is kept
    if checkpointing:
        kept, again = shape.layers * (0 if on_host else shape.hidden * size), layer + again
    else:
        kept = shape.layers * layer
    # The last norm; the states that predict actions, their gradients, and those in the places of their row.
    states = shape.hidden * (4 + 5 * size)
    return tokens * kept + max(tokens * again, tokens * states + _head(shape, tokens, size, gpu))


def _head(shape: ModelShape, tokens: int, size: int, gpu: int | None) -> int:
    """A chunk of logits, and the gradient of the head."""
    weights = shape.vocabulary * shape.hidden
    logits = min(logits_bytes(gpu), 4 * shape.vocabulary * tokens)
    if gpu is None:
        return 3 * 4 * weights + logits  # weights in float32, their gradient, and that once more
    rounded = size if size < 4 else 0  # bytes of a number beside its four in float32: of a chunk, then of all
    return 4 * weights + max(logits * (4 + rounded) // 4, weights * rounded)
