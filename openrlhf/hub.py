"""Selects the hub on which names of models and datasets are looked up.

transformers, vLLM and `datasets` load from the Hugging Face hub. A name on ModelScope is downloaded to a
local folder first, which they read like any other, so none of them is patched."""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

import huggingface_hub

from openrlhf.errors import ErrorCode, UsageError, first_line

VARIABLE = "OPENRLHF_HUB"
"""Environment variable with the hub; forwarded to every process of a run on every machine."""

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")


def choose_hub(use_ms: bool) -> None:
    """Selects ModelScope or Hugging Face for this process and those that it starts."""
    if use_ms:
        os.environ[VARIABLE] = "modelscope"
    else:
        os.environ.pop(VARIABLE, None)


def uses_modelscope() -> bool:
    return os.environ.get(VARIABLE) == "modelscope"


def model_folder(name: str, *, weights: bool = False) -> str:
    """Returns the path or name from which transformers and vLLM load `name`: the local copy of ModelScope's
    files if ModelScope is selected, else `name` itself. Without `weights` only the small files are fetched.
    Raises UsageError if they cannot be fetched."""
    if not uses_modelscope() or Path(name).exists():
        return name
    return str(_snapshot(name, "model", weights))


def config_json(name: str) -> dict[str, Any]:
    """Returns a model's config.json, without transformers; {} if this machine has none that can be read."""
    folder = Path(model_folder(name))
    file = folder / "config.json"
    try:
        if not folder.exists():
            file = Path(str(huggingface_hub.try_to_load_from_cache(name, "config.json")))
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return {}


def dataset_folder(name: str) -> Path:
    """Returns the local folder of a ModelScope dataset. Raises UsageError if it cannot be fetched."""
    return _snapshot(name, "dataset", True)


@cache
def _snapshot(name: str, kind: Literal["model", "dataset"], weights: bool) -> Path:
    """Returns the folder with the newest version, or with the cached one if ModelScope cannot be reached. The
    machine's processes share ModelScope's cache, which is locked."""
    from modelscope.hub.snapshot_download import snapshot_download

    left_out = None if weights else list(WEIGHTS)
    try:
        return Path(snapshot_download(name, repo_type=kind, ignore_patterns=left_out))
    except Exception as error:  # ModelScope's own types, and those of its dependencies
        reason = first_line(error)
        try:
            folder = snapshot_download(name, repo_type=kind, local_files_only=True)
        except Exception:
            text = f"not on this machine, and ModelScope says: {reason}"
            raise UsageError(ErrorCode.NOT_FOUND, text, flag="--use_ms", value=name) from error
    print(f"note: --use_ms {name}: {reason}; reading the copy in {folder}", file=sys.stderr, flush=True)
    return Path(folder)
