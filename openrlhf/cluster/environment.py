"""Environment variables and working folder, which all processes of a run take from the process that starts
it. Relative paths therefore mean the same everywhere."""

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

FOLDER = "OPENRLHF_FOLDER"
"""Variable with the folder in which the run was started."""


def forwarded() -> dict[str, str]:
    """Returns the variables that Ray sets in each process before it imports anything. Ray writes them to its
    logs, so secrets are omitted."""
    own = {n: v for n, v in os.environ.items() if n.startswith(PREFIXES) and not _SECRET.search(n)}
    return own | {FOLDER: os.getcwd()}


def private() -> dict[str, str]:
    """Returns the variables with secrets, which must not be logged. They are passed to `take`, because
    libraries read them only when needed."""
    return {
        name: value
        for name, value in os.environ.items()
        if _PROXY.fullmatch(name) or (name.startswith(PREFIXES) and _SECRET.search(name))
    }


def enter(private: Mapping[str, str] | None = None) -> None:
    """Sets the variables of `private` in this process, and changes to the run's folder if it exists on this
    machine. Otherwise only absolute paths work."""
    os.environ.update(private or {})
    folder = os.environ.get(FOLDER, "")
    if os.path.isdir(folder):
        os.chdir(folder)
