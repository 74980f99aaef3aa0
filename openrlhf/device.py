"""The kind of device that this machine computes on (CUDA/ROCm or CPU), and its properties."""

import os

import psutil
import torch

# torch asks NVML instead of the driver, whose answer would initialise CUDA and make it unusable in processes
# forked later.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"

VISIBLE_DEVICES = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
"""Name of the variable that lists a process's visible GPUs: numbers, or names of GPUs and MIG slices."""

# DeepSpeed reads this variable at import, and transformers imports DeepSpeed at an unknown time.
os.environ.setdefault("DS_ACCELERATOR", DEVICE_TYPE)


def visible_index(name: int | str) -> int:
    """Returns torch's index, in this process, of the GPU that Ray calls `name`. Raises ValueError if it is
    not visible.

    Ray makes only a worker's own GPUs visible to it, or all GPUs of the node if one of the
    RAY_EXPERIMENTAL_NOSET_* variables is set."""
    visible = os.environ.get(VISIBLE_DEVICES, "")
    return visible.split(",").index(str(name)) if visible else int(name)


def compute_capability() -> str:
    """Returns the device's kernel level: the CUDA compute capability, or a CPU's vector instructions."""
    if DEVICE_TYPE == "cuda":
        return "cuda {}.{}".format(*torch.cuda.get_device_capability())
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def own_bytes() -> int:
    """Returns the bytes of memory of this process: of its GPU, or its share among the ranks of a machine."""
    if DEVICE_TYPE == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return psutil.virtual_memory().total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def idle_gpus() -> int:
    """Returns the number of visible GPUs beyond one for each rank of the run."""
    return max(0, torch.cuda.device_count() - int(os.environ.get("WORLD_SIZE", "1")))
