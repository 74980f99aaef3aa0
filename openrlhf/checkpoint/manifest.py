"""The manifest of a checkpoint folder: the sizes and SHA-256 hashes of its files, by which a reader detects
damage."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import NamedTuple, Self

from openrlhf.errors import first_line
from openrlhf.files import read_object, sync_file, sync_folder, unwritable, write_atomically

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the manifest's format. A reader rejects later versions."""

SMALL = 1 << 20
"""Maximum size in bytes of files whose hash is always compared."""


class Entry(NamedTuple):
    """Size and hash of a file."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> Self:
        with file.open("rb") as opened:
            return cls(os.fstat(opened.fileno()).st_size, hashlib.file_digest(opened, "sha256").hexdigest())


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The files of a checkpoint folder."""

    files: Mapping[str, Entry]
    """Relative path -> entry, for every file of the folder except the manifest."""
    step: int | None = None
    """Training step of the checkpoint; None until it is complete."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Name of another model's folder -> SHA-256 of the manifest of that model's checkpoint from the same
    save."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the manifest of a folder. Raises ValueError with the reason if it is missing or
        unreadable."""
        text = read_object(folder / MANIFEST)
        try:
            if not 1 <= text["format"] <= FORMAT:
                raise ValueError(f"{MANIFEST} has format {text['format']}, and this release reads {FORMAT}")
            listed = text["files"].items()
            files = {name: Entry(index(entry["bytes"]), entry["sha256"]) for name, entry in listed}
            return cls(files=files, step=text["step"], parts=dict(text["parts"]))
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f"{MANIFEST} is unreadable: it is no manifest") from None

    def write(self, folder: Path) -> None:
        entries = {name: {"bytes": e.num_bytes, "sha256": e.sha256} for name, e in sorted(self.files.items())}
        text = {"format": FORMAT, "step": self.step, "parts": dict(self.parts), "files": entries}
        write_atomically(folder / MANIFEST, [json.dumps(text, indent=1)])

    def damage(self, folder: Path, *, hashes: bool) -> str | None:
        """Returns a message about the first file that differs from the manifest, or that loaders find and it
        does not list. Compares all sizes, and hashes of up to SMALL bytes, with `hashes` of all."""
        for name, entry in self.files.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != entry.num_bytes:
                return f"{name} has {size:,} bytes instead of {entry.num_bytes:,}"
        for path in folder.rglob("*.*") if self.step is not None else ():
            if path.suffix in (".pt", ".distcp") and str(path.relative_to(folder)) not in self.files:
                return f"{path.relative_to(folder)} is not one of its files; move it away to resume from here"
        read = [name for name, entry in self.files.items() if hashes or entry.num_bytes <= SMALL]
        found = compute_entries(folder, read)
        differing = [name for name, entry in found.items() if entry != self.files[name]]
        return f"{differing[0]} has changed since it was saved" if differing else None


def compute_entries(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Computes the entries of these files in several threads."""
    names = list(names)
    with ThreadPoolExecutor(max(1, min(len(names), os.cpu_count() or 1, 16))) as pool:
        return dict(zip(names, pool.map(lambda name: Entry.of(folder / name), names), strict=True))


def complete(folder: Path, *, step: int, parts: Mapping[str, str] | None = None) -> str:
    """Completes the manifest of a folder that has all its files, and returns the manifest's SHA-256. Adds the
    files that the engine's manifest does not list. Syncs everything to the disk. Raises ValueError if a file
    that the engine lists is missing or has another size."""
    listed = Manifest.read(folder).files if (folder / MANIFEST).exists() else {}
    if reason := Manifest(files=listed).damage(folder, hashes=False):
        raise ValueError(f"{folder}: {reason}")
    names = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()} - {MANIFEST}
    new = compute_entries(folder, sorted(names - listed.keys()))
    for name in new:
        sync_file(folder / name)
    Manifest(files={**listed, **new}, step=step, parts=parts or {}).write(folder)
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        sync_folder(path)
    return Entry.of(folder / MANIFEST).sha256


def why_unwritten(error: BaseException, folder: Path) -> str:
    """Returns the reason why a file could not be written to `folder`. torch's errors do not contain it: it is
    in the error that they follow from, or found by writing a small file."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return unwritable(folder) or first_line(error)
