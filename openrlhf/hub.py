"""The hub on which names of models and datasets are looked up.

transformers, vLLM and `datasets` know that of Hugging Face. A name on ModelScope becomes a folder of this
machine first, which they read as they read any other: nothing inside them is replaced."""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Literal

from openrlhf.errors import first_line

VARIABLE = "OPENRLHF_HUB"
"""Of the environment: every process of a run has it, on whichever machine."""

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")


def choose_hub(use_ms: bool) -> None:
    """For this process, and for those that it starts."""
    if use_ms:
        os.environ[VARIABLE] = "modelscope"
    else:
        os.environ.pop(VARIABLE, None)


def uses_modelscope() -> bool:
    return os.environ.get(VARIABLE) == "modelscope"


def model_folder(name: str, *, weights: bool = False) -> str:
    """What transformers and vLLM load `name` from: its folder on this machine where ModelScope has it, else
    the name itself. Without `weights` only what is small has been fetched. ValueError where it cannot be."""
    if not uses_modelscope() or Path(name).exists():
        return name
    return str(_snapshot(name, "model", weights))


def dataset_folder(name: str) -> Path:
    """The files of a dataset on ModelScope. ValueError where they cannot be fetched."""
    return _snapshot(name, "dataset", True)


@cache
def _snapshot(name: str, kind: Literal["model", "dataset"], weights: bool) -> Path:
    """Its newest version. ModelScope's cache is shared by the processes of a machine, and locked."""
    from modelscope.hub.snapshot_download import snapshot_download

    left_out = None if weights else list(WEIGHTS)
    try:
        return Path(snapshot_download(name, repo_type=kind, ignore_patterns=left_out))
    except Exception as error:  # its own types, and those of whatever it is made with
        reason = first_line(error)
        try:
            folder = snapshot_download(name, repo_type=kind, local_files_only=True)
        except Exception:
            text = f"--use_ms {name}: not on this machine, and from ModelScope: {reason}"
            raise ValueError(text) from error
    print(f"note: --use_ms {name}: {reason}; reading the copy in {folder}", file=sys.stderr, flush=True)
    return Path(folder)
