"""Environment variables that every process of a run takes over from the process that started the run."""

import os
import re
from collections.abc import Mapping

PREFIXES = (
    *("FI_", "GLOO_", "HF_", "MODELSCOPE_", "NCCL_", "OPENRLHF_", "PYTORCH_", "TORCH_", "TRANSFORMERS_"),
    *("UCX_", "VLLM_"),
)
"""Prefixes of the variables that configure a run's libraries. CUDA_VISIBLE_DEVICES, PATH and the like belong
to a machine and are not forwarded."""

_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD)(_|$)")
_PROXY = re.compile(r"(https?|all|no)_proxy", re.IGNORECASE)
"""Names of proxy variables, whose addresses may contain a password."""


def forwarded() -> dict[str, str]:
    """Returns the variables that Ray sets before a process imports anything. Ray writes them to its logs, so
    secrets are left out."""
    return {n: v for n, v in os.environ.items() if n.startswith(PREFIXES) and not _SECRET.search(n)}


def private() -> dict[str, str]:
    """Returns the variables that must not be logged, for `take`. Libraries read them late, when needed."""
    return {
        name: value
        for name, value in os.environ.items()
        if _PROXY.fullmatch(name) or (name.startswith(PREFIXES) and _SECRET.search(name))
    }


def take(variables: Mapping[str, str]) -> None:
    """Sets the variables of `private` in this process."""
    os.environ.update(variables)
