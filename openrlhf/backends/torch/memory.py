"""Estimates a rank's memory under PyTorch's `fully_shard`."""

from openrlhf.backends.row_memory import ITEM_BYTES, ModelShape, RowMemory, activations
from openrlhf.config.sections import DeepSpeedConfig


def row_memory(
    shape: ModelShape, ds: DeepSpeedConfig, *, ranks: int, tokens: int, checkpointing: bool, gpu: int | None
) -> RowMemory:
    """Estimates the peak memory of an optimizer step from the documentation of `fully_shard`: float32 shards,
    plus the parameters and gradients that are gathered at a time. `shape.weight_bytes`: of the float32
    weights. `tokens`: tokens of the longest row. `gpu`: the GPU's memory in bytes; None: on a CPU."""
    size, is_sharded = ITEM_BYTES[ds.param_dtype], ranks > 1 or ds.param_dtype != "fp32"
    own, layer = shape.trainable // ranks, shape.trainable // max(shape.layers, 1)
    gathered = shape.weight_bytes // 4 * size
    if ds.zero_stage == 3:  # at a time: two layers, and the parameters outside of layers
        gathered = min(gathered, (2 * layer + 2 * shape.vocabulary * shape.hidden) * size)
    on_host = ds.activation_offload and gpu is not None
    return RowMemory(
        weights=shape.weight_bytes // ranks + (gathered if is_sharded else 0),
        gradients=4 * own + (4 * layer if is_sharded else 0),
        optimizer=8 * own,
        activations=activations(shape, tokens, size, checkpointing, gpu, on_host=on_host),
    )
