"""What kind of device this machine computes on."""

import os
import subprocess

import torch

# By default torch asks the driver, which starts CUDA: no process that is forked later could use it. Now it
# asks NVML.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"

VISIBLE_DEVICES = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
"""The variable with the GPUs that a process sees: numbers, or names of GPUs and MIG slices."""

# DeepSpeed asks this variable when it is imported, which transformers does at a time of its own.
os.environ.setdefault("DS_ACCELERATOR", DEVICE_TYPE)


def visible_index(name: int | str) -> int:
    """torch's number, in this process, of the GPU that Ray calls `name`. ValueError where it is not visible.

    Ray shows a worker its own GPUs alone, or with one of its RAY_EXPERIMENTAL_NOSET_* variables all of the
    node."""
    visible = os.environ.get(VISIBLE_DEVICES, "")
    return visible.split(",").index(str(name)) if visible else int(name)


def compute_capability() -> str:
    """Which kernels this process's device has: of CUDA's its capability, of a CPU its vector instructions."""
    if DEVICE_TYPE == "cuda":
        return "cuda {}.{}".format(*torch.cuda.get_device_capability())
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def gpu_bytes() -> int | None:
    """Memory of this machine's smallest GPU, asked of its driver, so that nothing is started on it. None
    where it has no figure: without a GPU, and for those of another make."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return min((int(mib) << 20 for mib in answer.stdout.split() if mib.isdecimal()), default=None)
