"""Makes engines run on a CPU what they run on GPUs, in every process that has this folder in its PYTHONPATH.

vLLM's second model runner asks for Triton, and on a CPU for a backend of that name. This one has no compiler,
and nobody asks for one where TRITON_INTERPRET=1 has kernels interpreted. Asynchronous scheduling vLLM
switches off on a CPU; it stays on where ASYNCHRONOUS_SCHEDULING is set.
"""

import os
from typing import Any


class Number(int):
    """Counter of a kernel's loop with the method that the compiled one, a tensor, has."""

    def to(self, dtype: Any) -> "Number":
        return self


def as_on_gpus() -> None:
    """vLLM calls this in each of its processes before it makes a configuration."""
    from triton.runtime import interpreter

    interpreter.range = lambda *borders: map(Number, range(*borders))
    if os.environ.get("ASYNCHRONOUS_SCHEDULING"):
        _schedule_asynchronously()


def _schedule_asynchronously() -> None:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_schedule(cls: type, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_schedule)
