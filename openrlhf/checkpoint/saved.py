"""One checkpoint of a run on the disk: what it records of its run, and whether it is damaged."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

from openrlhf.checkpoint import manifest
from openrlhf.checkpoint.dcp import forged
from openrlhf.checkpoint.manifest import MANIFEST, Entry, Manifest
from openrlhf.checkpoint.run_fingerprint import RunFingerprint
from openrlhf.errors import notify
from openrlhf.files import read_object

BEST = "best_"
UNIVERSAL = "_universal"
"""Suffix of the tag of a checkpoint in DeepSpeed's universal format."""
METRIC = "metric.json"
"""File with the evaluation metric of a checkpoint, by which checkpoints are ranked."""
ORIGIN = "origin.json"
"""File with the fingerprint of a checkpoint (flags, data, models) and the time at which it was written."""


class Record(NamedTuple):
    """The content of the file ORIGIN."""

    fingerprint: RunFingerprint
    fork: Mapping[str, Any]
    """Record of the fork by which the run began (fork.py); {} if it began otherwise."""
    written: str
    """Time at which the checkpoint was completed."""
    has_manifest: bool = True

    @classmethod
    def read(cls, file: Path) -> Self:
        """Reads the file. Raises ValueError if it is damaged."""
        found = read_object(file)
        try:
            fingerprint = RunFingerprint(**found["origin"])
            fingerprint = replace(
                fingerprint, flags=dict(fingerprint.flags), contents=dict(fingerprint.contents)
            )
            return cls(
                fingerprint, dict(found.get("fork", {})), str(found["written"]), "manifest_format" in found
            )
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{file.name} is unreadable: it holds no origin") from None

    def write(self, file: Path) -> None:
        about = {"written": self.written, "manifest_format": manifest.FORMAT}
        about |= {"fork": self.fork} if self.fork else {}
        file.write_text(
            json.dumps({**about, "origin": self.fingerprint.as_dict()}, indent=1), encoding="utf-8"
        )


class Saved(NamedTuple):
    """A checkpoint, with a folder named `tag` for each model of the run."""

    folders: Sequence[Path]
    """The folders of the models' checkpoints. A checkpoint is complete when the first has it."""
    tag: str

    @property
    def place(self) -> Path:
        return self.folders[0] / self.tag

    @property
    def step(self) -> int:
        return parse_step(self.tag)

    def record(self) -> Record | None:
        """Reads the file ORIGIN; None without one. Raises ValueError for a damaged one."""
        file = self.place / ORIGIN
        return Record.read(file) if os.path.lexists(file) else None

    def written(self) -> str:
        """Returns the recorded time of completion, or else the folder's modification time."""
        with suppress(ValueError):
            if record := self.record():
                return record.written
        return format_time(self.place.stat().st_mtime)

    def metric(self) -> float:
        """Returns the metric; minus infinity without one. Prints damage to its file."""
        file = self.place / METRIC
        try:
            value = read_object(file).get("metric_value") if os.path.lexists(file) else None
            return -float("inf") if value is None or math.isnan(value) else float(value)
        except (ValueError, TypeError, OverflowError) as error:
            notify(f"{file}: {error}: the checkpoint counts as one without a metric")
            return -float("inf")

    def damage(self, *, hashes: bool) -> str | None:
        """Returns the reason why no run can resume from it; None if one can. `hashes`: compares the hashes of
        all files instead of those of small ones."""
        place = ""
        try:
            record = self.record()
            if self.tag.endswith(UNIVERSAL):
                return None if (self.place / "zero").is_dir() else "it has no folder `zero`"
            if not ((self.place / MANIFEST).exists() or (record and record.has_manifest)):
                # an older release wrote it
                return None if any(self.place.iterdir()) else "its folder is empty"
            listed = Manifest.read(self.place)
            if listed.step != self.step:
                return f"{MANIFEST} is of step {listed.step}"
            if reason := listed.damage(self.place, hashes=hashes) or forged(self.place):
                return reason
            for other in self.folders[1:]:
                place, part = f"{other.name}: ", other / self.tag
                its_files = Manifest.read(part)
                if Entry.of(part / MANIFEST).sha256 != listed.parts.get(other.name):
                    return f"{place}{MANIFEST} belongs to another save"
                if reason := its_files.damage(part, hashes=hashes) or forged(part):
                    return place + reason
        except ValueError as error:
            return f"{place}{error}"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return None


def parse_step(tag: str) -> int:
    return int(tag.removesuffix(UNIVERSAL).rpartition("global_step")[2])


def format_time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
