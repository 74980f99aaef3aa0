"""Backend of Triton that lets engines on a CPU run their GPU code, in every process with this folder in
PYTHONPATH.

The second model runner of vLLM asks for Triton, and on a CPU for a Triton backend named "cpu". This backend
has no compiler, and none is needed with TRITON_INTERPRET=1, which interprets kernels. vLLM switches
asynchronous scheduling off on a CPU; ASYNCHRONOUS_SCHEDULING keeps it on.
"""

import os
from typing import Any


class Number(int):
    """Loop counter of an interpreted kernel, with the method of a compiled kernel's counter, which is a
    tensor."""

    def to(self, dtype: Any) -> "Number":
        return self


def as_on_gpus() -> None:
    """Changes vLLM to act as on GPUs; vLLM calls this in each of its processes before it builds a
    configuration."""
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
