"""Python's garbage collector in processes full of libraries.

torch, transformers, DeepSpeed and vLLM make 700,000 objects that live as long as their process. While they
are imported the collector goes through all that there are again and again, a fifth of the time of the
imports, and later once in a few steps, for half a second in which the process does nothing else.
"""

import atexit
import gc

DEFAULTS = gc.get_threshold()
GROWING = 200_000, 20, 100
"""Thresholds of a process that imports: what becomes garbage young is found, and hardly anything is looked at
twice."""


def grow() -> None:
    """A process begins to import."""
    gc.set_threshold(*GROWING)


def freeze() -> None:
    """A process that grew has what it works with: from now on the collector looks at what is made later, as
    often as it always did. Before models are loaded, whose garbage would stay."""
    if gc.get_threshold() != GROWING:
        return
    gc.freeze()
    gc.set_threshold(*DEFAULTS)
    atexit.register(gc.unfreeze)  # else nanobind takes what is left at the end for leaks
