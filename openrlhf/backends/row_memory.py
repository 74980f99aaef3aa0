"""Estimates the memory that a rank needs to train on a row.

The estimate is the size of the tensors in forward and backward passes of a decoder with gated MLPs; other
architectures are similar. It excludes the memory of libraries (0.5 to 1 GB per process) and fragmentation.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Self

from openrlhf.algorithms.logprobs import logits_bytes
from openrlhf.errors import ErrorCode, UsageError

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per element of each dtype of `--ds.param_dtype`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a model from which its memory is estimated."""

    weight_bytes: int
    trainable: int
    """Number of trained parameters."""
    vocabulary: int
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

    @classmethod
    def of(cls, config: Any, *, weight_bytes: int, trainable: int, normed_heads: bool) -> Self:
        """Reads the sizes from a model's transformers configuration."""
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
            vocabulary=number("vocab_size"),
            layers=number("num_hidden_layers"),
            hidden=hidden,
            intermediate=intermediate * max(experts, 1),
            queries=heads * size,
            keys=(number("num_key_value_heads") or heads) * size,
            normed_heads=normed_heads,
            experts=experts,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMemory:
    """Memory of one rank in bytes, by purpose."""

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
    """Returns the maximum number of tokens in a row under the flags `train.*`. `longest`: tokens of the
    longest item; `sharing`: sequence-parallel size."""
    if train.dynamic_batch_enable:
        row = max(longest, train.max_tokens_per_gpu * sharing)
        return min(row, longest * train.batch_size)
    return longest * train.micro_batch_size


def memory_of_rows(
    estimate: Callable[[int], RowMemory], train: Any, longest: int, sharing: int, room: int
) -> str:
    """Describes a rank's memory for the longest row, see `most_tokens`. Raises UsageError, with the largest
    value of the flag that fits, if it is more than `room` bytes. `estimate`: tokens of a row -> memory."""
    tokens = most_tokens(train, longest, sharing)
    needed = estimate(tokens)
    text = f"{needed} for a row of up to {tokens:,} tokens"
    if needed.total <= room:
        return text
    name = "max_tokens_per_gpu" if train.dynamic_batch_enable else "micro_batch_size"
    value, step = getattr(train, name), sharing if train.dynamic_batch_enable else longest
    exceeds = lambda number: estimate(max(longest, number * step)).total > room
    fitting = bisect_left(range(value), True, lo=1, key=exceeds) - 1
    remedy = f"Use --train.{name} {fitting}."
    if not fitting:
        remedy = f"Even a row of {longest:,} tokens does not fit; `openrlhf plan` names flags that help."
    text = f"a rank needs an estimated {text}, and has {room / 2**30:.1f} GB.\n{remedy}"
    raise UsageError(ErrorCode.RESOURCES, text, flag=f"--train.{name}", value=value)


def layer_bytes(shape: ModelShape, size: int) -> int:
    """Returns the bytes per token that a layer keeps for its backward pass. `size`: bytes per element; norms
    compute in float32."""
    norms = 2 * shape.hidden * (4 + 2 * size)  # input, normalized input, and product with the weight
    heads = (shape.queries + shape.keys) * (4 + size) if shape.normed_heads else 0
    attention = (3 * shape.queries + 2 * shape.keys) * size  # the output before and after projection
    mlp = 4 * shape.intermediate * size  # gate, its activation, the up projection, the product
    copies = 2 * shape.experts * shape.hidden * size  # inputs and outputs of each expert
    return norms + heads + attention + mlp + copies


def activations(
    shape: ModelShape, tokens: int, size: int, checkpointing: bool, gpu: int | None, *, on_host: bool
) -> int:
    """Returns the peak memory of activations in bytes: what all layers keep, plus the maximum of recomputing
    one layer and computing the head."""
    layer = layer_bytes(shape, size)
    # Gradients of a layer's MLP and of its norm, in float32, which exist beside its activations.
    again = 3 * shape.intermediate * size + 4 * shape.hidden
    if checkpointing:
        kept, again = shape.layers * (0 if on_host else shape.hidden * size), layer + again
    else:
        kept = shape.layers * layer
    # The last norm, the hidden states at actions, their gradients, and the gradients of the row's hidden
    # states.
    states = shape.hidden * (4 + 5 * size)
    return tokens * kept + max(tokens * again, tokens * states + _head(shape, tokens, size, gpu))


def _head(shape: ModelShape, tokens: int, size: int, gpu: int | None) -> int:
    """Returns the bytes of a chunk of logits plus the gradient of the head."""
    weights = shape.vocabulary * shape.hidden
    logits = min(logits_bytes(gpu), 4 * shape.vocabulary * tokens)
    if gpu is None:
        # The gradient in float32; in half precision also weights in float32 and a copy of the gradient.
        return (4 if size == 4 else 8 + size) * weights + logits
    # bytes per element of a low-precision copy, first of a chunk's logits, then of the gradient
    rounded = size if size < 4 else 0
    return 4 * weights + max(logits * (4 + rounded) // 4, weights * rounded)
