"""heap.py, in processes of their own, because it changes the caller's garbage collector."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from openrlhf import heap


def printed(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("package", ["openrlhf.cli", "openrlhf.cluster"])
def test_a_process_imports_with_few_collections_and_works_with_as_many_as_ever(package: str) -> None:
    code = (
        f"import gc; before = gc.get_threshold(); import {package}; from openrlhf import heap\n"
        "print(gc.get_threshold() == heap.GROWING); own = [[] for _ in range(1000)]; heap.freeze()\n"
        "print(gc.get_threshold() == before, gc.get_freeze_count() > 1000)\n"
        "print(any(o is own for o in gc.get_objects()))"
    )
    assert printed(code) == ["True", "True", "True", "False"]


def test_a_process_that_did_not_grow_and_one_that_has_frozen_stay_as_they_are() -> None:
    code = (
        "import gc; from openrlhf import heap\n"
        "before = gc.get_freeze_count(); heap.freeze(); print(gc.get_freeze_count() - before)\n"
        "heap.grow(); heap.freeze(); count = gc.get_freeze_count(); more = [[] for _ in range(1000)]\n"
        "heap.freeze(); print(gc.get_freeze_count() == count)"
    )
    assert printed(code) == ["0", "True"]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_the_memory_of_a_freed_array_is_kept_for_the_next_one() -> None:
    code = (
        "import resource; import numpy as np; from openrlhf import heap\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def pages(): before = faults(); np.empty(64 << 20, np.uint8).fill(1); return faults() - before\n"
        "heap.keep(); pages(); print(pages() < 10)"
    )
    assert printed(code) == ["True"]


@pytest.mark.parametrize("variables", [{}, {"MALLOC_ARENA_MAX": "2"}])
def test_freed_memory_is_kept_unless_the_user_says_otherwise(monkeypatch, variables: dict[str, str]) -> None:
    options: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda option, value: options.append((option, value)))
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(heap.os, "environ", {"HOME": "/", **variables})
    heap.keep()
    assert options == ([] if variables else [*heap.MALLOPT.items()])
