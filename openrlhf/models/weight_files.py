"""Checks the files of a model's weights before they are loaded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from openrlhf.errors import ErrorCode, UsageError, first_line

LARGEST_HEADER = 100_000_000
"""Maximum size of a header in bytes, as the format defines it."""
UNREADABLE = (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError)
"""Errors of a file of something else."""


def check_weight_files(folder: str | Path, flag: str) -> None:
    """Raises UsageError if a file of a local model is missing, cannot be read, is cut short or longer than
    its header says, or is a pickle of anything but tensors. Reads only headers
    (https://huggingface.co/docs/safetensors#format) and lists of contents."""
    for reason in _damages(Path(folder)):
        raise UsageError(
            ErrorCode.INVALID_MODEL, f"{reason}.\nDownload or copy it again.", flag=flag, value=folder
        )


def _damages(place: Path) -> Iterator[str]:
    files, index = sorted(place.glob("[!.]*.safetensors")), place / "model.safetensors.index.json"
    for file in files or sorted(place.glob("pytorch_model*.bin")):
        try:
            size, expected = file.stat().st_size, None
            if file.suffix == ".bin":
                torch.load(file, map_location="meta", weights_only=True)
            elif (expected := _expected_bytes(file)) != size:
                what = (
                    "an unreadable header" if expected is None else f"{size:,} bytes instead of {expected:,}"
                )
                yield f"{file.name} has {what}"
        except OSError as error:
            yield f"{file.name} cannot be read: {error.strerror}"
        except Exception as error:  # a damaged pickle can raise any error
            reason = next((x.strip() for x in str(error).splitlines() if "GLOBAL" in x), first_line(error))
            yield f"{file.name} is damaged, or holds objects that could run code: {reason[:200]}"
    try:
        listed = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else ()
        missing = [name for name in sorted(set(listed)) if not (place / name).exists()]
    except UNREADABLE:
        yield f"{index.name} cannot be read, or lists no weights"
    else:
        yield from (f"{index.name} lists {name}, which is missing" for name in missing)


def _expected_bytes(file: Path) -> int | None:
    """Returns the size of the file by its header; None if the header cannot be read."""
    try:
        length, tensors = _header(file)
        return 8 + length + max((int(about["data_offsets"][1]) for about in tensors), default=0)
    except OSError:
        raise
    except UNREADABLE:
        return None


def _header(file: Path) -> tuple[int, list[dict[str, Any]]]:
    """Returns the length of the header, and the entries of all tensors."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length)) if length <= LARGEST_HEADER else {"": None}
    return length, [about for name, about in header.items() if name != "__metadata__"]


def quantized_types(folder: str | Path) -> set[str]:
    """Returns the types of numbers in the files of a local model, which are whole, that only quantized
    weights have."""
    files = Path(folder).glob("*.safetensors")
    types = {str(about["dtype"]) for file in files for about in _header(file)[1]}
    return {name for name in types if name.startswith(("F8", "F4"))}
