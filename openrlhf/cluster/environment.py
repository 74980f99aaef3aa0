"""Environment variables that the process that starts a run forwards to all processes of the run."""

import os
import re
from collections.abc import Mapping

PREFIXES = (
    *("FI_", "GLOO_", "HF_", "MODELSCOPE_", "NCCL_", "OPENRLHF_", "PYTORCH_", "TORCH_", "TRANSFORMERS_"),
    *("UCX_", "VLLM_"),
)
"""Prefixes of variables that configure the run's libraries. Variables that belong to a machine, such as PATH
and CUDA_VISIBLE_DEVICES, are not forwarded."""

_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD)(_|$)")
_PROXY = re.compile(r"(https?|all|no)_proxy", re.IGNORECASE)
"""Names of proxy variables, whose addresses may contain a password."""


def forwarded() -> dict[str, str]:
    """Returns the variables that Ray sets in each process before it imports anything. Ray writes them to its
    logs, so secrets are omitted."""
    return {n: v for n, v in os.environ.items() if n.startswith(PREFIXES) and not _SECRET.search(n)}


def private() -> dict[str, str]:
    """Returns the variables with secrets, which must not be logged. They are passed to `take`, because
    libraries read them only when needed."""
    return {
        name: value
        for name, value in os.environ.items()
        if _PROXY.fullmatch(name) or (name.startswith(PREFIXES) and _SECRET.search(name))
    }


def take(variables: Mapping[str, str]) -> None:
    """Sets the variables of `private` in this process."""
    os.environ.update(variables)
