"""Tunes Python's garbage collector, and malloc, for processes that import large libraries.

torch, transformers, DeepSpeed and vLLM create 700,000 objects that live as long as their process. With
default thresholds the collector scans all of them repeatedly, which takes a fifth of the import time, and
later stops the process for half a second every few steps."""

import atexit
import ctypes
import gc
import os

DEFAULTS = gc.get_threshold()
GROWING = 200_000, 20, 100
"""Collector thresholds during imports: short-lived garbage is found, and hardly any object is scanned
twice."""


def grow() -> None:
    """Sets the thresholds for imports."""
    gc.set_threshold(*GROWING)


def freeze() -> None:
    """Excludes all present objects from collection and restores the default thresholds, if `grow` was called.
    Call it after imports and before models are loaded, because later garbage would never be freed."""
    if gc.get_threshold() != GROWING:
        return
    gc.freeze()
    gc.set_threshold(*DEFAULTS)
    atexit.register(gc.unfreeze)  # else nanobind reports leaks at exit


MALLOPT = {-3: 1 << 30, -1: 2**31 - 1}
"""Values in bytes of glibc's options M_MMAP_THRESHOLD (blocks below it come from the heap) and
M_TRIM_THRESHOLD (free heap up to it is kept)."""


def keep() -> None:
    """Makes malloc keep the memory of freed arrays for later ones, in processes that compute with many arrays
    of some 10 MB: the system fills each of its pages with zeros, which takes longer than arithmetic on it.
    Without effect where the C library is not glibc. MALLOC_* variables of the user take precedence."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and not any(name.startswith("MALLOC_") for name in os.environ):
        for option, value in MALLOPT.items():
            library.mallopt(option, value)
