"""Checks the sizes of a model's safetensors files before they are loaded."""

import json
from pathlib import Path

from openrlhf.errors import ErrorCode, UsageError

LARGEST_HEADER = 100_000_000
"""Maximum size of a header in bytes, as the format defines it."""


def check_weight_files(folder: str | Path, flag: str) -> None:
    """Raises UsageError if a file of a local model is missing, cut short or longer than its header says.
    Reads only headers (https://huggingface.co/docs/safetensors#format)."""
    place = Path(folder)
    for file in sorted(place.glob("[!.]*.safetensors")):
        size, expected = file.stat().st_size, _expected_bytes(file)
        if size != expected:
            what = "an unreadable header" if expected is None else f"{size:,} bytes instead of {expected:,}"
            text = f"{file.name} has {what}.\nDownload or copy it again."
            raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=folder)
    for name in sorted(_listed(place / "model.safetensors.index.json")):
        if not (place / name).exists():
            text = f"model.safetensors.index.json lists {name}, which is missing.\nDownload or copy it again."
            raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=folder)


def _expected_bytes(file: Path) -> int | None:
    """Returns the size of the file by its header; None if the header cannot be read."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > LARGEST_HEADER:
            return None
        try:
            header = json.loads(opened.read(length))
            ends = [about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"]
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            return None
    return 8 + length + max(ends, default=0)


def _listed(index: Path) -> set[str]:
    return set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else set()
