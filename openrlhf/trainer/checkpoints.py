"""Which checkpoints a run keeps, and which one it resumes from. What is in them is the engine's affair."""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.config.sections import CkptConfig

logger = logging.getLogger(__name__)

LATEST = "latest"
"""File with the tag to resume from, written when that checkpoint is complete."""

METRIC = "metric.json"
BEST = "best_"
COPY = "_hf"
"""What `ckpt.save_hf` puts behind the tag, in the folder `ckpt.path`."""
_TAG = re.compile(r"global_step\d+")
_BEST_TAG = re.compile(rf"{BEST}global_step\d+")


class CheckpointFolder:
    """Checkpoints `global_step{N}` of a run, and at most one `best_global_step{N}`, in one folder.

    `others`: folders with the checkpoints of more models, under the same tags. They come and go together, and
    with them the Hugging Face copies of the same step.
    """

    def __init__(self, path: str, ckpt: CkptConfig, others: Sequence[str] = ()) -> None:
        self.path, self.ckpt = Path(path), ckpt
        self.folders = (self.path, *map(Path, others))

    def latest(self) -> str | None:
        """Tag of the last complete checkpoint, None where there is none."""
        pointer = self.path / LATEST
        if not pointer.exists():
            return None
        tag = pointer.read_text().strip()
        if not (self.path / tag).is_dir():
            raise ValueError(
                f"--ckpt.path {self.path}: the file {LATEST} names {tag}, which is not there.\n"
                f"Write the name of one of the folders beside it into that file, or remove it to start over."
            )
        return tag

    def completed(self, tag: str, metric: float | None = None) -> None:
        """Every rank has written `tag`, a checkpoint or a copy or both: from now on it counts. Older ones
        make room."""
        is_checkpoint = (self.path / tag).is_dir()
        if is_checkpoint and metric is not None:
            (self.path / tag / METRIC).write_text(json.dumps({"metric_value": metric}))
        if tag.startswith(BEST):
            for other in self._tags(_BEST_TAG) - {tag}:
                self._remove(other)
            return
        if is_checkpoint:
            _write_atomically(self.path / LATEST, tag)
        self._rotate(tag)

    def _rotate(self, newest: str) -> None:
        tags = list(self._tags(_TAG) - {newest})
        # The worst metric goes first, then the oldest; one without a metric counts as worst.
        tags.sort(key=lambda tag: (_metric(self.path / tag), _step(tag)))
        kept_bytes = {tag: sum(map(_size, self._places(tag))) for tag in [*tags, newest]}
        while tags and (
            len(tags) + 1 > self.ckpt.max_num or sum(kept_bytes.values()) > self.ckpt.max_mem * 1e9
        ):
            gone = tags.pop(0)
            del kept_bytes[gone]
            self._remove(gone)

    def _remove(self, tag: str) -> None:
        for place in self._places(tag):
            if place.exists():
                shutil.rmtree(place)

    def _places(self, tag: str) -> list[Path]:
        """Where something of this step may be."""
        return [*(folder / tag for folder in self.folders), Path(self.ckpt.path) / f"{tag}{COPY}"]

    def _tags(self, kind: re.Pattern[str]) -> set[str]:
        checkpoints = {p.name for folder in self.folders for p in folder.glob("*") if p.is_dir()}
        copies = {p.name.removesuffix(COPY) for p in Path(self.ckpt.path).glob(f"*{COPY}") if p.is_dir()}
        return {tag for tag in checkpoints | copies if kind.fullmatch(tag)}


def check_origin(tag: str, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """ValueError where the run of a checkpoint visits its data in another order than this one. `before` and
    `now`: flag -> value; None where the checkpoint does not say."""
    if before is None:
        logger.warning("%s does not say which data and flags it is of: nothing could be compared", tag)
        return
    changed = [
        f"{flag} was {before.get(flag)}, is {value}"
        for flag, value in now.items()
        if before.get(flag) != value
    ]
    if changed:
        raise ValueError(
            f"--ckpt.load_enable: {tag} is of a run that visits its data in another order:\n"
            + "\n".join(changed)
            + "\nResume with what was, or start over: without --ckpt.load_enable, or in another --ckpt.path."
        )


def _metric(folder: Path) -> float:
    file = folder / METRIC
    return json.loads(file.read_text())["metric_value"] if file.exists() else -float("inf")


def _step(tag: str) -> int:
    return int(tag.removeprefix("global_step"))


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    with temporary.open() as f:
        os.fsync(f.fileno())
    temporary.rename(path)
