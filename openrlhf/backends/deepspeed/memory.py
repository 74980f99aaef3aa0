"""Estimates a rank's memory under DeepSpeed at each ZeRO stage."""

from openrlhf.backends.deepspeed.config import bucket_elements
from openrlhf.backends.row_memory import ITEM_BYTES, ModelShape, RowMemory, activations
from openrlhf.config.sections import DeepSpeedConfig

MAX_LIVE_PARAMETERS = 10**9
"""Maximum number of parameters that stage 3 keeps gathered, the default of DeepSpeed's
max_live_parameters."""


def row_memory(
    shape: ModelShape, ds: DeepSpeedConfig, *, ranks: int, tokens: int, checkpointing: bool, gpu: int | None
) -> RowMemory:
    """Estimates the peak memory of an optimizer step. `ranks`: number of ranks over which optimizer states
    and, at stage 3, weights are sharded. `tokens`: this rank's part of the longest row. `gpu`: the GPU's
    memory in bytes; None: on a CPU."""
    size, stage = ITEM_BYTES[ds.param_dtype], ds.zero_stage
    own = shape.trainable // ranks
    # Master weights and Adam's two moments; at stage 0 the weights in float32 are their own master.
    state = 8 if ds.param_dtype == "fp32" and stage == 0 else 12
    whole = min(shape.weight_bytes, MAX_LIVE_PARAMETERS * size)
    on_gpu = gpu is not None
    return RowMemory(
        weights=shape.weight_bytes // ranks + whole if stage == 3 else shape.weight_bytes,
        gradients=_gradients(shape, ds, own, on_gpu),
        optimizer=0 if on_gpu and ds.adam_offload else state * (own if stage > 0 else shape.trainable),
        activations=max(
            activations(shape, tokens, size, checkpointing, gpu, on_host=on_gpu and ds.activation_offload),
            4 * own,  # during the optimizer step: gradients in float32
        ),
    )


def _gradients(shape: ModelShape, ds: DeepSpeedConfig, own: int, on_gpu: bool) -> int:
    size, bucket = ITEM_BYTES[ds.param_dtype], bucket_elements(ds)
    if ds.zero_stage < 2:
        return shape.trainable * size
    buffer = bucket if on_gpu else min(bucket, shape.trainable)
    return 4 * own + buffer * size * (2 if ds.overlap_comm else 1)
