"""Tunes Python's garbage collector, and malloc, for processes that import large libraries.

torch, transformers, DeepSpeed and vLLM create 700,000 objects that live as long as their process. With
default thresholds the collector scans all of them repeatedly, which takes a fifth of the import time, and
later stops the process for half a second every few steps."""

import atexit
import ctypes
import gc
from contextlib import suppress

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


KEPT_BYTES = 1 << 30
"""Memory that `keep` lets malloc keep at most."""


def keep() -> None:
    """Makes malloc keep the memory of freed arrays for later ones, in processes that compute with many arrays
    of some 10 MB: the system fills each of its pages with zeros, which takes longer than arithmetic on it.
    Without effect where the C library is not glibc."""
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            mallopt(parameter, KEPT_BYTES)
