"""What DeepSpeed keeps on a rank at each ZeRO stage."""

from openrlhf.backends.deepspeed.config import ITEM_BYTES, bucket_elements
from openrlhf.backends.row_memory import ModelShape, RowMemory, activations
from openrlhf.config.sections import DeepSpeedConfig

LIVE = 10**9
"""Parameters that stage 3 keeps whole after it gathered them: DeepSpeed's max_live_parameters."""


def row_memory(
    shape: ModelShape, ds: DeepSpeedConfig, *, ranks: int, tokens: int, checkpointing: bool, gpu: int | None
) -> RowMemory:
    """At the peak of a training step. `ranks`: that share optimizer states, and at stage 3 weights. `tokens`:
    of the longest row, that this rank computes. `gpu`: bytes of its memory; None: on a CPU."""
    size, stage = ITEM_BYTES[ds.param_dtype], ds.zero_stage
    own = shape.trainable // ranks
    whole = min(shape.weight_bytes, LIVE * size)
    on_gpu = gpu is not None
    return RowMemory(
        weights=shape.weight_bytes // ranks + whole if stage == 3 else shape.weight_bytes,
        gradients=_gradients(shape, ds, own, on_gpu),
        optimizer=0 if on_gpu and ds.adam_offload else 12 * (own if stage > 0 else shape.trainable),
        activations=max(
            activations(shape, tokens, size, checkpointing, gpu, on_host=on_gpu and ds.activation_offload),
            4 * own,  # in the optimizer's step: gradients in float32
        ),
    )


def _gradients(shape: ModelShape, ds: DeepSpeedConfig, own: int, on_gpu: bool) -> int:
    size, bucket = ITEM_BYTES[ds.param_dtype], bucket_elements(ds)
    if ds.zero_stage < 2:
        return shape.trainable * size
    buffer = bucket if on_gpu else min(bucket, shape.trainable)
    return 4 * own + buffer * size * (2 if ds.overlap_comm else 1)
