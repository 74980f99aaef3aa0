"""What the processes of a run have, on every machine, of the environment that it was started in."""

import os
import re
from collections.abc import Mapping

PREFIXES = (
    *("FI_", "GLOO_", "HF_", "MODELSCOPE_", "NCCL_", "OPENRLHF_", "PYTORCH_", "TORCH_", "TRANSFORMERS_"),
    *("UCX_", "VLLM_"),
)
"""Of the variables by which a run's libraries are told what to do. CUDA_VISIBLE_DEVICES, PATH and their like
belong to a machine."""

_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD)(_|$)")
_PROXY = re.compile(r"(https?|all|no)_proxy", re.IGNORECASE)
"""The names of variables with addresses that may have a password in them."""


def forwarded() -> dict[str, str]:
    """For the environment that Ray starts a process in, before it imports anything. Ray writes it to its
    logs."""
    return {n: v for n, v in os.environ.items() if n.startswith(PREFIXES) and not _SECRET.search(n)}


def private() -> dict[str, str]:
    """What no log may have: for `take`. Libraries read these when they need them."""
    return {
        name: value
        for name, value in os.environ.items()
        if _PROXY.fullmatch(name) or (name.startswith(PREFIXES) and _SECRET.search(name))
    }


def take(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
