"""Checks the files of a model's weights before they are loaded."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from openrlhf.errors import ErrorCode, UsageError, first_line, notify_once

LARGEST_HEADER = 100_000_000
"""Maximum size of a header in bytes, as the format defines it."""
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INTEGERS = ("I8", "U8", "I32")
"""Types of whole numbers that quantized weights have."""
UNREADABLE = (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError)
"""Errors of a file of something else."""


def check_weight_files(folder: str | Path, flag: str) -> None:
    """Raises UsageError if a file of a local model is missing, damaged, or a pickle of anything but tensors.
    Reads only headers (https://huggingface.co/docs/safetensors#format) and lists of contents."""
    for reason in _damages(Path(folder)):
        raise UsageError(
            ErrorCode.INVALID_MODEL, f"{reason}.\nDownload or copy it again.", flag=flag, value=folder
        )
    if Path(folder, WHOLE).exists() and (shard := next(Path(folder).glob("model-*.safetensors"), None)):
        text = f"{WHOLE} is read, and vLLM reads {shard.name}; remove what is of another model"
        notify_once(f"note: {flag} {folder}: {text}")


def _damages(place: Path) -> Iterator[str]:
    files, index = sorted(place.glob("[!.]*.safetensors")), place / INDEX
    for file in files or sorted(place.glob("pytorch_model*.bin")):
        try:
            if file.suffix == ".bin":
                torch.load(file, map_location="meta", weights_only=True)
            else:
                length, tensors = _header(file)
                ends = [int(about["data_offsets"][1]) for about in tensors.values()]
                expected = 8 + length + max(ends, default=0)
                if (size := file.stat().st_size) != expected:
                    yield f"{file.name} has {size:,} bytes instead of {expected:,}"
        except OSError as error:
            yield f"{file.name} cannot be read: {error.strerror}"
        except Exception as error:  # a damaged pickle can raise any error
            reason = next((x.strip() for x in str(error).splitlines() if "GLOBAL" in x), first_line(error))
            pickled = f"is damaged, or holds objects that could run code: {reason[:200]}"
            yield f"{file.name} {pickled if file.suffix == '.bin' else 'has an unreadable header'}"
    try:
        listed = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else ()
        missing = [name for name in sorted(set(listed)) if not (place / name).exists()]
    except UNREADABLE:
        yield f"{index.name} cannot be read, or lists no weights"
    else:
        where = f", beside a {WHOLE}: remove the index if it is of another model" * (place / WHOLE).exists()
        yield from (f"{INDEX} lists {name}, which is missing{where}" for name in missing)


def _header(file: Path) -> tuple[int, dict[str, Mapping[str, Any]]]:
    """Returns the length of the header, and what it says about each tensor."""
    with file.open("rb") as opened:
        if (length := int.from_bytes(opened.read(8), "little")) > LARGEST_HEADER:
            raise ValueError("the header is too long")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return length, header


def quantized_type(folder: str | Path) -> str:
    """Returns the type of quantized weights in a local model's safetensors files; "" without one. Masks that
    old models store beside their weights have whole numbers, too."""
    for file in Path(folder).glob("[!.]*.safetensors"):
        with suppress(*UNREADABLE):
            for name, about in _header(file)[1].items():
                if about["dtype"].startswith("F8_") or (about["dtype"] in INTEGERS and "weight" in name):
                    return about["dtype"]
    return ""
