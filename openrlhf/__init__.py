"""Sets the variables and log levels that libraries read at import. Every process imports this module
first."""

import logging
import os
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from openrlhf import cuda_builds

if TYPE_CHECKING:
    from openrlhf.api import *  # noqa: F403


def set_variables() -> None:
    """Sets variables that libraries read at import: one progress bar per rank and file is noise, and waiting
    OpenMP threads sleep instead of spinning on cores that other processes need."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


set_variables()

# bitsandbytes recommends a kernel from the hub in every process, with 4-bit weights or without.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# vLLM logs in every engine process that Triton has no CPU backend, before it reads its own log settings.
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)

cuda_builds.mend()


def __getattr__(name: str) -> Any:
    """Returns a public name of `openrlhf.api` when it is first used: large libraries are imported with it. Or
    the version, which follows from a tag when the package is built."""
    if name == "__version__":
        return _version()
    api = import_module("openrlhf.api")
    if name not in api.PUBLIC:
        raise AttributeError(
            f"openrlhf has no public name {name!r}; there are {', '.join(sorted(api.PUBLIC))}"
        )
    return getattr(api, name)


def _version() -> str:
    try:
        return metadata.version("openrlhf")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # sources that are not installed
