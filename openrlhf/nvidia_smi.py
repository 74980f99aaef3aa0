"""NVIDIA GPUs of the machine as nvidia-smi lists them, without torch."""

import subprocess

QUERY_TIMEOUT = 60.0
"""Seconds that nvidia-smi has to answer."""


def gpu_bytes() -> int | None:
    """Returns the memory in bytes of this machine's smallest GPU, from nvidia-smi, which starts nothing on
    the GPU. None without an NVIDIA GPU."""
    return min((int(mib) << 20 for mib in _nvidia_smi("memory.total") if mib.isdecimal()), default=None)


def gpu_names() -> list[str]:
    """Returns the name of each of this machine's NVIDIA GPUs, from nvidia-smi."""
    return _nvidia_smi("name")


def _nvidia_smi(field: str) -> list[str]:
    """Returns a field of each NVIDIA GPU; empty without one."""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=QUERY_TIMEOUT)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
