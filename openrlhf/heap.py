"""Tunes Python's garbage collector for processes that import large libraries.

torch, transformers, DeepSpeed and vLLM create 700,000 objects that live as long as their process. With
default thresholds the collector scans all of them again and again, a fifth of the import time, and later once
every few steps, for half a second in which the process stops.
"""

import atexit
import gc

DEFAULTS = gc.get_threshold()
GROWING = 200_000, 20, 100
"""Collector thresholds during imports: short-lived garbage is found, and hardly any object is scanned
twice."""


def grow() -> None:
    """Sets the thresholds for imports."""
    gc.set_threshold(*GROWING)


def freeze() -> None:
    """Excludes all objects so far from collection and restores the default thresholds, if `grow` was called.
    To be called after imports and before models are loaded, whose garbage would stay."""
    if gc.get_threshold() != GROWING:
        return
    gc.freeze()
    gc.set_threshold(*DEFAULTS)
    atexit.register(gc.unfreeze)  # else nanobind reports leaks at exit
