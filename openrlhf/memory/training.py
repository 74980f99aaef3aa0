"""Estimates the memory that a rank needs to train on a row, and to read one.

The estimate is the size of the tensors in forward and backward passes of a decoder with gated MLPs; other
architectures are similar. It excludes the memory of libraries (0.5 to 1 GB per process) and fragmentation.
"""

from dataclasses import astuple, dataclass, replace

from openrlhf.algorithms.logprobs import logits_bytes
from openrlhf.config.choices import BackendName
from openrlhf.config.sections import DeepSpeedConfig
from openrlhf.memory.sizes import ITEM_BYTES, ModelShape, trained_item

MAX_LIVE_PARAMETERS = 10**9
"""Maximum number of parameters that stage 3 keeps gathered, the default of DeepSpeed's
max_live_parameters."""

FITS = 0.95
"""Maximum fraction of a device's memory that a plan fills, because allocators fragment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Memory of one rank in an optimizer step in bytes, by purpose."""

    weights: int = 0
    gathered: int = 0
    """Weights that are gathered from other ranks for a pass."""
    gradients: int = 0
    buckets: int = 0
    """Gradients that wait for their reduction over ranks."""
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    """Memory of the head beyond `activations`."""
    step: int = 0
    """Gradients in float32 of the optimizer step, beyond the memory of the passes."""

    @property
    def total(self) -> int:
        return sum(astuple(self))

    @property
    def parts(self) -> dict[str, float]:
        """The memory by the names of openrlhf/memory."""
        names = ("weights", "gradients", "optimizer", "activations", "logits")
        return {name: getattr(self, name) for name in names} | {
            "buffers": self.gathered + self.buckets + self.step
        }

    def __str__(self) -> str:
        unit, size = ("GB", 2**30) if self.total >= 2**30 else ("MB", 2**20)
        parts = {
            "weights": self.weights + self.gathered,
            "gradients": self.gradients + self.buckets,
            "optimizer": self.optimizer,
            "activations": self.activations + self.logits + self.step,
        }
        listed = ", ".join(f"{name} {count / size:.1f}" for name, count in parts.items())
        return f"{self.total / size:.1f} {unit} ({listed})"


def training_memory(
    shape: ModelShape,
    ds: DeepSpeedConfig,
    backend: BackendName,
    tokens: int,
    checkpointing: bool,
    *,
    ranks: int = 1,
    gpu: int | None = None,
    with_entropy: bool = False,
) -> RankMemory:
    """Estimates the peak memory of an optimizer step. `tokens`: this rank's part of the longest row. `ranks`:
    number of ranks over which optimizer states and, at stage 3, weights are sharded. `gpu`: the GPU's memory
    in bytes; None: on a CPU. `with_entropy`: the loss has an entropy bonus."""
    size, own, on_gpu = ITEM_BYTES[ds.param_dtype], shape.trainable // ranks, gpu is not None
    row = (tokens, size, checkpointing, gpu)
    passes, headless = (
        activations(some, *row, on_host=on_gpu and ds.activation_offload, with_entropy=with_entropy)
        for some in (shape, replace(shape, vocabulary=0))
    )
    if backend == "torch":  # from the documentation of `fully_shard`
        sharded, is_sharded, step = True, ranks > 1 or ds.param_dtype != "fp32", 0
        gradients, buckets = 4 * own, 4 * (shape.trainable // max(shape.layers, 1)) * is_sharded
    else:
        sharded, is_sharded, step = ds.zero_stage == 3, ds.zero_stage == 3, max(0, 4 * own - passes)
        gradients, buckets = 4 * own, _bucket_bytes(shape, ds, on_gpu)
        if ds.zero_stage < 2:
            gradients, buckets = shape.trainable * size, 0
    is_away = on_gpu and ds.adam_offload
    return RankMemory(
        weights=shape.weight_bytes // ranks if sharded else shape.weight_bytes,
        gathered=gathered_bytes(shape, ds, backend, trained=True) if is_sharded else 0,
        gradients=gradients,
        buckets=buckets,
        optimizer=0 if is_away else state_bytes(ds, backend) * (own if ds.zero_stage else shape.trainable),
        activations=headless,
        logits=passes - headless,
        step=step,
    )


def state_bytes(ds: DeepSpeedConfig, backend: BackendName) -> int:
    """Returns the bytes of optimizer states per trained parameter: Adam's two moments in float32, and float32
    master weights unless the weights are their own: with the torch backend, and in float32 at stage 0."""
    has_masters = backend != "torch" and (ds.param_dtype != "fp32" or ds.zero_stage > 0)
    return 12 if has_masters else 8


def gathered_bytes(shape: ModelShape, ds: DeepSpeedConfig, backend: BackendName, *, trained: bool) -> int:
    """Returns the maximum of a sharded model's weights in bytes that a rank gathers in a pass."""
    size = ITEM_BYTES[ds.param_dtype]
    if backend != "torch":
        return min(shape.weight_bytes, MAX_LIVE_PARAMETERS * size)
    whole = shape.weight_bytes * size // trained_item(ds, backend) if trained else shape.weight_bytes
    if ds.zero_stage < 3:
        return whole
    # At a time: two layers, and the parameters outside of layers.
    return min(whole, 2 * (whole // max(shape.layers, 1)) + 2 * shape.vocabulary * shape.hidden * size)


def bucket_elements(ds: DeepSpeedConfig) -> int:
    """Returns the size of DeepSpeed's communication bucket, in elements."""
    if ds.bucket_mb is None:
        return 500_000_000  # DeepSpeed's default
    return ds.bucket_mb * 2**20 // ITEM_BYTES[ds.param_dtype]


def _bucket_bytes(shape: ModelShape, ds: DeepSpeedConfig, on_gpu: bool) -> int:
    elements = bucket_elements(ds)
    buffer = elements if on_gpu else min(elements, shape.trainable)
    return buffer * ITEM_BYTES[ds.param_dtype] * (2 if ds.overlap_comm else 1)


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
    shape: ModelShape,
    tokens: int,
    size: int,
    checkpointing: bool,
    gpu: int | None,
    *,
    on_host: bool,
    with_entropy: bool = False,
) -> int:
    """Returns the peak memory of activations in bytes: what all layers keep, plus the maximum of recomputing
    one layer and computing the head; or, if that is more, the gradients of a head and of the embedding that
    is the same tensor, with their sum, which exist together when the backward pass ends."""
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
    head = _head(shape, tokens, size, gpu, with_entropy)
    passes = tokens * kept + max(tokens * again, tokens * states + head)
    weights = shape.vocabulary * shape.hidden
    is_tied = shape.tied and shape.trainable >= weights  # adapters leave both as they are
    return max(passes, 3 * size * weights if is_tied else 0)


def _head(shape: ModelShape, tokens: int, size: int, gpu: int | None, with_entropy: bool) -> int:
    """Returns the bytes of a chunk of logits plus the gradient of the head."""
    weights = shape.vocabulary * shape.hidden
    logits = min(logits_bytes(gpu), 4 * shape.vocabulary * tokens)
    # Bytes per element of a chunk: logits, which become their gradient, and the slope of the cap; beside them
    # the factors of an entropy bonus, and afterwards a low-precision copy.
    kept, rounded = 4 * (1 + shape.softcap), size if size < 4 else 0
    chunk = logits * (kept + max(4 * with_entropy, rounded)) // 4
    if gpu is None:
        # The gradient in float32; in half precision also weights in float32 and a copy of the gradient.
        return (4 if size == 4 else 8 + size) * weights + chunk
    return 4 * weights + max(chunk, weights * rounded)


def forward_memory(shape: ModelShape, tokens: int, item: int, gpu: int | None) -> dict[str, float]:
    """Returns the memory of a pass without gradients besides the weights: one layer's activations of the row,
    and a chunk of logits. On a CPU the head's weights also exist in float32. `item`: bytes per element."""
    logits = min(logits_bytes(gpu), 4 * shape.vocabulary * tokens)
    if gpu is None and item < 4:
        logits += 4 * shape.vocabulary * shape.hidden
    return {"activations": tokens * layer_bytes(shape, item), "logits": logits}
