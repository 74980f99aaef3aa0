"""Sets the variables and log levels that libraries read at import. Every process imports this module
first."""

import logging
import os
from typing import Any

from openrlhf import cuda_builds

__version__ = "0.1.0"


def set_variables() -> None:
    """Sets variables that the Hugging Face libraries read at import: one progress bar per rank and file is
    noise."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


set_variables()

# bitsandbytes recommends a kernel from the hub in every process, with 4-bit weights or without.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# vLLM logs in every engine process that Triton has no CPU backend, before it reads its own log settings.
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)

cuda_builds.mend()


def __getattr__(name: str) -> Any:
    """Returns a public name of `openrlhf.api`, which imports large libraries, when it is first used."""
    if name.startswith("_"):
        raise AttributeError(name)
    from importlib import import_module

    try:
        return getattr(import_module("openrlhf.api"), name)
    except AttributeError:
        raise AttributeError(
            f"module 'openrlhf' has no name {name!r}; openrlhf.api lists the public ones"
        ) from None
