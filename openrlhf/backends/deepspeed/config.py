"""Builds DeepSpeed's configuration from the flags `ds.*`."""

from typing import Any

from openrlhf.config.pass_through import merge
from openrlhf.config.sections import DeepSpeedConfig
from openrlhf.device import DEVICE_TYPE
from openrlhf.memory.training import bucket_elements


def training_config(ds: DeepSpeedConfig, *, max_norm: float, muon: bool = False) -> dict:
    """Returns the configuration of a trained model. Gradient accumulation is set to 1, because the number of
    micro-batches differs from step to step; DeepSpeedEngine sets the accumulation boundary itself.
    `ds.config` comes last: `owned_options` has refused what would change the rest."""
    zero = _zero_section(ds)
    if ds.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": DEVICE_TYPE == "cuda"}
    if muon and ds.zero_stage == 3:
        zero["reduce_scatter"] = False  # every rank orthogonalizes full gradients
    config = _common(ds, zero) | {"gradient_clipping": max_norm}
    accumulated = ds.grad_accum_dtype or ("fp32" if ds.zero_stage >= 2 else None)
    if accumulated is not None:
        config["data_types"] = {"grad_accum_dtype": accumulated}
    return merge(config, ds.config)


def inference_config(ds: DeepSpeedConfig, *, offload: bool) -> dict:
    """Returns the configuration of a frozen model with sharded weights, kept on the CPU with `offload`."""
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": "auto"}
    if offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": DEVICE_TYPE == "cuda"}
    return _common(ds, zero)


def _common(ds: DeepSpeedConfig, zero: dict) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": None,
        # The throughput timer would synchronize with the GPU in every pass, for an unused result.
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if ds.param_dtype != "fp32":
        config[ds.param_dtype] = {"enabled": True}
    return config


def _zero_section(ds: DeepSpeedConfig) -> dict:
    zero = {"stage": ds.zero_stage}
    if ds.overlap_comm:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    elif ds.zero_stage < 3 and DEVICE_TYPE == "cpu":
        zero["contiguous_gradients"] = (
            False  # useful against fragmentation on GPUs only, and copies gradients
        )
    if ds.zero_stage == 3:
        zero["zero_hpz_partition_size"] = ds.zpg
    elements = bucket_elements(ds)
    return zero | {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
