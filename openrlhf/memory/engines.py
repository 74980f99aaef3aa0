"""Estimates the memory of rollout engines and of weight syncs."""

USABLE_FRACTION = 0.95
"""Fraction of the memory that models on the same GPUs leave free which an engine may use. The rest is for
weight syncs."""

CPU_KV_CACHE_GB = 0.25
"""Default of `--vllm.kv_cache_gb` on a CPU, in GiB. vLLM's own setting for CPUs accepts only whole GiB."""


def memory_fraction(asked: float, free: float | None) -> float:
    """Returns the fraction of a GPU's memory that an engine may use: `asked`, but no more than other models
    leave. `free`: fraction that other models leave free; None: there are no other models."""
    return asked if free is None else min(asked, USABLE_FRACTION * free)


def bucket_size(largest: int, total: int, most: int) -> int:
    """Returns the bytes of a buffer through which tensors of `total` bytes are sent: at most `most`, unless
    the largest tensor is larger, because each tensor has to fit the buffer."""
    return max(largest, min(total, most))
