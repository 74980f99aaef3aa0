"""A training process keeps memory that it frees and needs again in its next pass."""

import ctypes
import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from openrlhf.backends.distributed import init_distributed
init_distributed()
def a_pass():
    return torch.full((10_000_000,), 1.0).sum()  # 40 MB, above the most that glibc keeps by itself
for _ in range(20):  # until the heap has grown
    a_pass()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    a_pass()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    """Returns the number of pages that the system had to clear in twenty passes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS]
    return int(subprocess.check_output(command, env=kept | environment, text=True).splitlines()[-1])


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_memory_of_a_pass_is_kept_for_the_next_unless_the_user_says_otherwise() -> None:
    assert faults() < faults(MALLOC_MMAP_THRESHOLD_="131072") / 4
