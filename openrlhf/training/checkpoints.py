"""Selects the checkpoints that a run keeps and the one it resumes from. Engines read and write their
contents."""

import json
import re
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from openrlhf.config.sections import CkptConfig
from openrlhf.files import write_atomically
from openrlhf.observability.run_folder import set_aside
from openrlhf.training.origin import Origin, compare

LATEST = "latest"
"""File with the tag to resume from, written when that checkpoint is complete."""

UNIVERSAL = "_universal"
"""Suffix of a tag whose checkpoint is in DeepSpeed's universal form, and of LATEST in the name of the file
that names the last such checkpoint."""

METRIC = "metric.json"
ORIGIN = "origin.json"
"""File with the origin of a checkpoint (flags, data, models) and the time at which it was written."""

BEST = "best_"
COPY = "_hf"
"""Suffix of the Hugging Face copies that `ckpt.save_hf` writes to the checkpoint folder."""
_TAG = re.compile(r"global_step\d+")
_BEST_TAG = re.compile(rf"{BEST}global_step\d+")
_OWN = re.compile(rf"({BEST})?global_step\d+({COPY}|{UNIVERSAL})?|{LATEST}({UNIVERSAL})?|_actor|_critic")
"""Names that a training command or the universal converter writes to a checkpoint folder."""


class CheckpointFolder:
    """Checkpoints `global_step{N}` of a run, and at most one `best_global_step{N}`, in one folder.

    `others`: folders with the checkpoints of further models under the same tags. A step's checkpoints,
    Hugging Face copies and universal forms are removed together. `origin`: the run's origin; None where it
    neither reads nor writes checkpoints. `universal`: resume from the universal form where the last
    checkpoint has one.
    """

    def __init__(
        self,
        path: str,
        ckpt: CkptConfig,
        others: Sequence[str] = (),
        origin: Origin | None = None,
        *,
        universal: bool = False,
    ) -> None:
        self.path, self.ckpt, self.origin = Path(path), ckpt, origin
        self.folders = (self.path, *map(Path, others))
        self.pointers = (LATEST + UNIVERSAL, LATEST) if universal else (LATEST,)

    def choose(self) -> tuple[str | None, list[str]]:
        """Returns the tag to resume from (None to start from the beginning) and lines to print about it.
        Raises ValueError where the checkpoint belongs to a run that this one cannot continue."""
        if not self.ckpt.load_enable:
            return None, self._found()
        tag = self.latest()
        if tag is None:
            return None, [f"--ckpt.load_enable: {self.path} has no checkpoint: starting from the beginning"]
        resuming = f"resuming from {self.path / tag}: step {_step(tag)}, written {self._written(tag)}"
        origin = self._origin_of(tag)
        if origin is None:
            untold = "it is of a version that does not tell its flags and models: they could not be compared"
            return tag, [resuming, untold]
        return tag, [resuming, *self.check(tag, origin)]

    def check(self, tag: str, before: Origin) -> list[str]:
        """Returns remarks on the changes since `before`, the checkpoint's origin. Raises ValueError where a
        change forbids resuming."""
        assert self.origin is not None  # of every run that resumes
        differences, remarks = compare(before, self.origin)
        if differences:
            raise ValueError(
                f"--ckpt.load_enable: {self.path / tag} is of another run:\n"
                + "\n".join(f"  {text}" for text in differences)
                + "\nResume with what was. Or start over: in another --ckpt.output_dir, or without\n"
                "--ckpt.load_enable, which keeps what is there."
            )
        return remarks

    def _found(self) -> list[str]:
        """Returns a line about an existing checkpoint, for a run that starts from the beginning."""
        tag = self._named()
        if tag is None or not (self.path / tag).is_dir():
            return []
        found = f"{self.path} has a checkpoint of step {_step(tag)}, written {self._written(tag)}"
        return [f"{found}; --ckpt.load_enable would resume from it"]

    def _named(self, name: str = LATEST) -> str | None:
        pointer = self.path / name
        return pointer.read_text().strip() if pointer.exists() else None

    def standing(self) -> str:
        """Returns a line that names the last checkpoint, or says that nothing was saved."""
        tag = self._named() if self.ckpt.is_used else None
        if tag is not None:
            again = "the same command with --ckpt.load_enable goes on from there"
            return f"the last checkpoint is {self.path / tag}: {again}"
        steps = self.ckpt.save_steps if self.ckpt.save_steps > 0 else "N"
        return f"nothing was saved: --ckpt.save_steps {steps} saves a checkpoint every {steps} steps"

    def set_aside(self) -> list[str]:
        """Moves the checkpoints of an earlier run to `previous/001`, `002`, ... Returns a line that says
        where they are."""
        own = sorted(path.name for path in Path(self.ckpt.folder).glob("*") if _OWN.fullmatch(path.name))
        if not own:
            return []
        place = set_aside(Path(self.ckpt.folder), own)
        return [f"the checkpoints of an earlier run are in {place}: --ckpt.path {place} names them"]

    def _origin_of(self, tag: str) -> Origin | None:
        """Returns the checkpoint's origin, None where its file is missing."""
        file = self.path / tag / ORIGIN
        return Origin(**json.loads(file.read_text())["origin"]) if file.exists() else None

    def _written(self, tag: str) -> str:
        """Returns the time of the checkpoint's completion: as recorded, else that of the file LATEST."""
        file = self.path / tag / ORIGIN
        if file.exists():
            return json.loads(file.read_text())["written"]
        return _time(datetime.fromtimestamp((self.path / LATEST).stat().st_mtime, UTC))

    def latest(self) -> str | None:
        """Returns the tag of the last complete checkpoint, None without one. Raises ValueError where its
        folder is missing."""
        named = {tag: pointer for pointer in self.pointers if (tag := self._named(pointer))}
        tag = max(named, key=_step, default=None)
        if tag is not None and not (self.path / tag).is_dir():
            raise ValueError(
                f"--ckpt.path {self.path}: the file {named[tag]} names {tag}, which is not there.\n"
                f"Write the name of one of the folders beside it into that file, or remove it to start over."
            )
        return tag

    def completed(self, tag: str, metric: float | None = None) -> None:
        """Marks `tag` (a checkpoint, a copy or both) as complete once every rank has written it, and removes
        checkpoints beyond the limits of `ckpt.*`."""
        is_checkpoint = (self.path / tag).is_dir()
        if is_checkpoint and self.origin is not None:
            about = {"written": _time(datetime.now(UTC)), "origin": self.origin.as_dict()}
            (self.path / tag / ORIGIN).write_text(json.dumps(about, indent=1))
        if is_checkpoint and metric is not None:
            (self.path / tag / METRIC).write_text(json.dumps({"metric_value": metric}))
        if tag.startswith(BEST):
            for other in self._tags(_BEST_TAG) - {tag}:
                self._remove(other)
            return
        if is_checkpoint:
            write_atomically(self.path / LATEST, [tag])
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
        """Returns the folders that may hold the state, universal form or copy of this step."""
        states = [folder / f"{tag}{form}" for folder in self.folders for form in ("", UNIVERSAL)]
        return [*states, Path(self.ckpt.folder) / f"{tag}{COPY}"]

    def _tags(self, kind: re.Pattern[str]) -> set[str]:
        checkpoints = {p.name for folder in self.folders for p in folder.glob("*") if p.is_dir()}
        copies = {p.name.removesuffix(COPY) for p in Path(self.ckpt.folder).glob(f"*{COPY}") if p.is_dir()}
        return {tag for tag in checkpoints | copies if kind.fullmatch(tag)}


def _metric(folder: Path) -> float:
    file = folder / METRIC
    return json.loads(file.read_text())["metric_value"] if file.exists() else -float("inf")


def _step(tag: str) -> int:
    return int(tag.removesuffix(UNIVERSAL).rpartition("global_step")[2])


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
