"""The folder with the checkpoints of a run: commits them, selects those to keep and the one to resume from.
Engines read and write their contents.

A checkpoint is written to the folder UNFINISHED and renamed when all of its files are on the disk, so a
folder `global_step{N}` is always complete. Its manifest (manifest.py) lists every file, and names
the manifests of the other models of the same save: the rename of the first folder commits all of them.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from openrlhf.checkpoint.manifest import MANIFEST, complete
from openrlhf.checkpoint.run_fingerprint import RunFingerprint, compare
from openrlhf.checkpoint.saved import BEST, METRIC, ORIGIN, UNIVERSAL, Record, Saved, format_time, parse_step
from openrlhf.config.sections import CkptConfig
from openrlhf.errors import ErrorCode, UsageError, notify
from openrlhf.faults import fault
from openrlhf.files import not_written, read_small, sync_folder, write_atomically
from openrlhf.observability.run_folder import set_aside

LATEST = "latest"
"""File with the tag to resume from, written when that checkpoint is complete. If it is missing or its
checkpoint is damaged, the newest undamaged folder is used. DeepSpeed's converter writes LATEST +
UNIVERSAL."""

UNFINISHED = ".saving"
"""Subfolder of each model's folder for the checkpoint that is being written."""

COPY = "_hf"
"""Suffix of the Hugging Face copies that `ckpt.save_hf` writes to the checkpoint folder."""
_TAG = re.compile(r"global_step\d+")
_NAMED = re.compile(r"(best_)?global_step\d+(_universal)?")
"""Tags that the file LATEST may name."""
_BEST_TAG = re.compile(rf"{BEST}global_step\d+")
_OWN = re.compile(rf"({BEST})?global_step\d+({COPY}|{UNIVERSAL})?|{LATEST}({UNIVERSAL})?|_actor|_critic")
"""Names that a training command or the universal converter writes to a checkpoint folder."""
OLDER = "an older release wrote it: it"


class CheckpointFolder:
    """The folder with the checkpoints `global_step{N}` of a run, and at most one `best_global_step{N}`.

    `others`: folders with the checkpoints of further models under the same tags. A step's checkpoints,
    Hugging Face copies and universal formats are removed together. `fingerprint`: the run's fingerprint; None
    if the run neither reads nor writes checkpoints. `universal`: resume from the universal format if the last
    checkpoint has one.
    """

    def __init__(
        self,
        path: str,
        ckpt: CkptConfig,
        others: Sequence[str] = (),
        fingerprint: RunFingerprint | None = None,
        *,
        universal: bool = False,
    ) -> None:
        self.path, self.ckpt, self.fingerprint = Path(path), ckpt, fingerprint
        self.folders = (self.path, *map(Path, others))
        self.fork: dict[str, Any] = {}
        """Record of the fork by which this run began (fork.py); {} if it began otherwise."""
        self.changed: dict[str, Any] | None = None
        """Settings that the fork changed, if this start begins with it; else None."""
        self.pointers = (LATEST + UNIVERSAL, LATEST) if universal else (LATEST,)

    @classmethod
    def of(cls, config: Any, fingerprint: RunFingerprint | None = None) -> Self:
        """Returns the folder with the checkpoints of all models that a run trains."""
        path, *others = config.checkpoints
        return cls(path, config.ckpt, others, fingerprint, universal=config.ds.use_universal_ckpt)

    def at(self, tag: str) -> Saved:
        """Returns the checkpoint with this tag."""
        return Saved(self.folders, tag)

    def find(self) -> "Found":
        """Finds the checkpoint to resume from: the one that LATEST names, or else the newest. Damaged ones
        are skipped. With `ckpt.verify` full, the hash of every file is compared."""
        names, skipped = self._tags_of_pointers()
        others = sorted(self._complete() - set(names), key=parse_step, reverse=True)
        for tag in [*names, *others]:
            if (reason := self.at(tag).damage(hashes=self.ckpt.verify == "full")) is None:
                return Found(tag, skipped)
            skipped.append(f"{tag}: {reason}")
        return Found(None, skipped)

    def choose(self, found: "Found | None" = None) -> tuple[str | None, list[str]]:
        """Returns the tag to resume from (None to start from the beginning) and lines to print about it.
        `found`: the result of `find`, if another rank has called it. Raises UsageError if all checkpoints are
        damaged, or if the checkpoint belongs to a run that this one cannot continue."""
        if not self.ckpt.load_enable:
            return None, self._found()
        tag, skipped = found or self.find()
        if tag is None and skipped:
            raise UsageError(
                ErrorCode.DAMAGED_CHECKPOINT,
                f"{self.path} has no checkpoint that this run can resume from:\n"
                + "\n".join(f"  {text}" for text in skipped)
                + "\nRestore one from a copy. Or start over: in another --ckpt.output_dir, or without\n"
                "--ckpt.load_enable, which keeps what is there.",
                flag="--ckpt.load_enable",
            )
        if tag is None:
            return None, [f"--ckpt.load_enable: {self.path} has no checkpoint: starting from the beginning"]
        saved = self.at(tag)
        lines = [f"resuming from {saved.place}: step {saved.step}, written {saved.written()}"]
        self.recall_fork(tag)
        if self.ckpt.fork_from and self.fork.get("from") != os.path.abspath(self.ckpt.fork_from):
            text = f"{saved.place} is not from it.\nName another --ckpt.output_dir, or omit this flag."
            raise UsageError(ErrorCode.CONFLICT, text, flag="--ckpt.fork_from", value=self.ckpt.fork_from)
        if (record := saved.record()) is None:
            return tag, [*lines, f"{OLDER} records no flags and models, so they are not compared"]
        if not (tag.endswith(UNIVERSAL) or (saved.place / MANIFEST).exists()):
            lines.append(f"{OLDER} has no manifest, so its files are not checked for damage")
        return tag, [*lines, *self.check(tag, record.fingerprint)]

    def recall_fork(self, tag: str) -> None:
        """Reads the record of the fork by which the run of this checkpoint began."""
        record = self.at(tag).record()
        self.fork = dict(record.fork) if record else {}
        self.changed = self.fork.get("changed") if self.fork.get("step") == parse_step(tag) else None

    def check(self, tag: str, before: RunFingerprint) -> list[str]:
        """Returns remarks on the changes since `before`, the checkpoint's fingerprint. Raises UsageError if a
        change forbids resuming."""
        assert self.fingerprint is not None  # set in every run that resumes
        differences, remarks = compare(before, self.fingerprint)
        if differences:
            text = (
                "this checkpoint belongs to another run:\n"
                + "\n".join(f"  {difference}" for difference in differences)
                + "\nResume with its settings, or fork it (--ckpt.fork_from). Or start over: in another\n"
                "--ckpt.output_dir, or without --ckpt.load_enable, which keeps what is there."
            )
            raise UsageError(ErrorCode.OTHER_RUN, text, flag="--ckpt.load_enable", value=self.path / tag)
        return remarks

    def _found(self) -> list[str]:
        """Returns a line about the newest checkpoint, if there is one, for a run that starts from the
        beginning."""
        names, _ = self._tags_of_pointers()
        if not (tags := names or sorted(self._complete(), key=parse_step, reverse=True)):
            return []
        newest = self.at(tags[0])
        found = f"{self.path} has a checkpoint of step {newest.step}, written {newest.written()}"
        return [f"{found}; --ckpt.load_enable would resume from it"]

    def _tags_of_pointers(self) -> tuple[list[str], list[str]]:
        """Returns the tags in the files LATEST and LATEST + UNIVERSAL, newest first, and the reasons why
        files have no usable tag. Both are empty for a folder without checkpoints."""
        found = [self._named(name) for name in self.pointers]
        reasons = [reason for _, reason in found if reason]
        names = sorted((tag for tag, reason in found if tag and not reason), key=parse_step, reverse=True)
        if not (names or reasons) and self._complete():
            reasons.append(f"the file {LATEST} is missing")
        return names, reasons

    def _complete(self) -> set[str]:
        """Returns the tags of the complete checkpoints. Those without manifest and fingerprint are of an
        earlier release, which did not rename complete ones: they count as complete up to the one that LATEST
        names. One that cannot be looked into counts, so that it is told."""
        tags = {name for name in _folders_in(self.path) if _TAG.fullmatch(name)}
        named, _ = self._named()
        last = parse_step(named) if named else -1
        closed = lambda tag: not os.access(self.path / tag, os.R_OK | os.X_OK)
        listed = lambda tag: any(os.path.lexists(self.path / tag / name) for name in (MANIFEST, ORIGIN))
        return {tag for tag in tags if closed(tag) or listed(tag) or parse_step(tag) <= last}

    def _named(self, name: str = LATEST) -> tuple[str, str]:
        """Returns the tag that a pointer names ("" without one), and the reason why it is of no use ("" if
        there is none)."""
        if not os.path.lexists(self.path / name):
            return "", ""
        try:
            tag = read_small(self.path / name).decode(errors="replace").strip()
        except ValueError as error:
            return "", f"the file {error}"
        if not _NAMED.fullmatch(tag):
            return "", f"the file {name} names no checkpoint"
        missing = f"the file {name} names {tag}, which does not exist"
        return tag, "" if os.path.isdir(self.path / tag) else missing

    def resume_hint(self) -> str:
        """Returns a message with the last checkpoint and how to resume from it, or that nothing was saved."""
        tag, reason = self._named() if self.ckpt.is_used else ("", "")
        if tag and not reason:
            again = "the same command with --ckpt.load_enable continues from it"
            return f"the last checkpoint is {self.path / tag}: {again}"
        if self.ckpt.save_steps > 0 and self.ckpt.disable_ds:
            return "nothing was saved to resume from: --ckpt.disable_ds"
        steps = self.ckpt.save_steps if self.ckpt.save_steps > 0 else "N"
        return f"nothing was saved: --ckpt.save_steps {steps} saves a checkpoint every {steps} steps"

    def set_aside(self) -> list[str]:
        """Moves the checkpoints of an earlier run to the next free folder `previous/001`, `previous/002`, ...
        Returns a line about it."""
        own = sorted(path.name for path in Path(self.ckpt.folder).glob("*") if _OWN.fullmatch(path.name))
        if not own:
            return []
        place = set_aside(Path(self.ckpt.folder), own)
        return [
            f"the checkpoints of an earlier run were moved to {place}: read them with --ckpt.path {place}"
        ]

    @contextmanager
    def saving(self, tag: str, metric: float | None = None, *, commits: bool = True) -> Iterator[Path]:
        """Yields the folder UNFINISHED of the first model. Inside the block, each model's engine writes its
        part of the checkpoint to the subfolder `tag` of the model's UNFINISHED. At the end of the block the
        checkpoint is renamed to `tag`, and old ones beyond the limits are removed. After an error its files
        are removed.

        `commits`: True on the one rank that renames and removes. `metric`: the evaluation metric by which
        this checkpoint is ranked.
        """
        with self.writing(commits=commits) as unfinished:
            yield unfinished
            if commits:
                self._commit(tag, metric)
        if commits:
            self.remove_unfinished()
            self._rotate(tag)

    @contextmanager
    def writing(self, *, commits: bool = True) -> Iterator[Path]:
        """Like `saving`, but leaves the files in UNFINISHED."""
        unfinished = self.path / UNFINISHED
        try:
            yield unfinished
        except BaseException as error:
            if commits:
                self.remove_unfinished()
            if commits and isinstance(error, OSError):
                place = error.filename or unfinished
                raise not_written(place, error.strerror or str(error)) from error
            raise

    def remove_unfinished(self) -> list[str]:
        """Removes unfinished checkpoints. Returns a line about each."""
        lines = []
        for folder in self.folders:
            if os.path.lexists(place := folder / UNFINISHED):
                tags = ", ".join(sorted(path.name for path in place.glob("*") if os.path.isdir(path)))
                lines.append(f"{place}: removed an unfinished checkpoint: {tags or 'no files'}")
                if place.is_symlink() or not place.is_dir():
                    place.unlink()
                shutil.rmtree(place, ignore_errors=True)  # ranks that are stopping may still write
        return lines

    def take_over(self, source: "CheckpointFolder", tag: str) -> None:
        """Commits a copy of another run's checkpoint, with this run's fingerprint. Files are linked where the
        disk allows it: none of them is ever written again."""
        new, beside = tag.removeprefix(BEST), shutil.ignore_patterns(MANIFEST, ORIGIN, METRIC)
        with self.saving(new):
            for theirs, own in zip(source.folders, self.folders, strict=True):
                shutil.copytree(theirs / tag, own / UNFINISHED / new, ignore=beside, copy_function=_linked)

    def _commit(self, tag: str, metric: float | None) -> None:
        """Moves the checkpoint from UNFINISHED to `tag` in the folders of all models. The first model's
        folder comes last, which commits the checkpoint."""
        made = self.path / UNFINISHED / tag
        if not made.is_dir():  # only a Hugging Face copy was saved
            return
        if self.fingerprint is not None:
            Record(self.fingerprint, self.fork, format_time(time.time())).write(made / ORIGIN)
        if metric is not None:
            (made / METRIC).write_text(json.dumps({"metric_value": metric}))
        others = [folder for folder in self.folders[1:] if (folder / UNFINISHED / tag).is_dir()]
        step = parse_step(tag)
        parts = {folder.name: complete(folder / UNFINISHED / tag, step=step) for folder in others}
        complete(made, step=step, parts=parts)
        fault("save.before_rename")
        for folder in others:
            self._take(folder, tag)
        fault("save.between_models")
        self._take(self.path, tag)
        fault("save.after_rename")
        if _TAG.fullmatch(tag):
            if (self.path / LATEST).is_dir():  # a file cannot replace it
                _move_aside(self.path / LATEST)
            write_atomically(self.path / LATEST, [tag])

    def _take(self, folder: Path, tag: str) -> None:
        """Moves a model's checkpoint out of UNFINISHED, with all other files that its engine wrote there."""
        if os.path.lexists(folder / tag) and not _removed(folder / tag):  # damaged, or an earlier save
            _move_aside(folder / tag)
        for path in sorted((folder / UNFINISHED).iterdir(), key=lambda path: path.name == tag):
            path.replace(folder / path.name)
        sync_folder(folder)

    def _rotate(self, newest: str) -> None:
        """Removes checkpoints beyond `ckpt.max_num`, `ckpt.max_mem` and `ckpt.max_age_hours`. The last limit
        spares the checkpoint with the best metric."""
        if newest.startswith(BEST):
            for other in self._tags(_BEST_TAG) - {newest}:
                self._remove(other)
            return
        # Worst metric first, then oldest first. A checkpoint without a metric counts as the worst.
        metrics = {tag: self.at(tag).metric() for tag in self._tags(_TAG) - {newest}}
        tags = sorted(metrics, key=lambda tag: (metrics[tag], parse_step(tag)))
        best = max(tags, key=lambda tag: metrics[tag], default=newest)
        for tag in [tag for tag in tags if self._is_old(tag)]:
            if tag != best or metrics[tag] == -float("inf"):
                tags.remove(tag)
                self._remove(tag)
        sizes = {tag: sum(map(_size, self._places(tag))) for tag in [*tags, newest]}
        while tags and (len(sizes) > self.ckpt.max_num or sum(sizes.values()) > self.ckpt.max_mem * 1e9):
            del sizes[tags[0]]
            self._remove(tags.pop(0))

    def _is_old(self, tag: str) -> bool:
        hours, places = self.ckpt.max_age_hours, [place for place in self._places(tag) if place.exists()]
        newest = max(place.stat().st_mtime for place in places)
        return hours is not None and time.time() - newest > hours * 3600

    def num_bytes(self) -> int:
        """Returns the size of the folder's checkpoints in bytes. New checkpoints replace them."""
        return sum(_size(place) for tag in self._tags(_TAG) for place in self._places(tag))

    def _remove(self, tag: str) -> None:
        fault("save.rotate")
        for place in self._places(tag):
            if os.path.lexists(place):
                _removed(place)

    def _places(self, tag: str) -> list[Path]:
        """Returns the folders that may hold this step's states, universal formats or Hugging Face copy."""
        states = [folder / f"{tag}{form}" for folder in self.folders for form in ("", UNIVERSAL)]
        return [*states, Path(self.ckpt.folder) / f"{tag}{COPY}"]

    def _tags(self, kind: re.Pattern[str]) -> set[str]:
        places = (*self.folders, Path(self.ckpt.folder))
        tags = {name.removesuffix(COPY) for place in places for name in _folders_in(place)}
        return {tag for tag in tags if kind.fullmatch(tag)}


class Found(NamedTuple):
    """The result of `CheckpointFolder.find`."""

    tag: str | None
    """Tag of the checkpoint to resume from; None without an undamaged one."""
    skipped: list[str]
    """Reasons why other checkpoints were skipped."""


def _folders_in(place: Path) -> list[str]:
    """Returns the names of the folders inside a folder; none if it does not exist. Raises UsageError if it
    cannot be listed."""
    try:
        os.stat(f"{place}/.")  # a list needs the right to read alone, the files in it this one, too
        return [entry.name for entry in os.scandir(place) if os.path.isdir(entry)]
    except FileNotFoundError:
        return []
    except OSError as error:
        text = f"its checkpoints cannot be listed: {error.strerror}.\nChange it, or name another folder."
        raise UsageError(ErrorCode.UNREADABLE, text, flag="--ckpt.path", value=place) from error


def _linked(file: str, to: str) -> None:
    try:
        os.link(file, to)
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, to)


def _removed(place: Path) -> bool:
    """Removes a folder. If that fails, prints the reason and returns False."""
    try:
        shutil.rmtree(place)
    except OSError as error:
        notify(f"{place} could not be removed: {error.strerror or error}. The run goes on.")
    return not os.path.lexists(place)


def _move_aside(place: Path) -> None:
    place.replace(beside := place.with_name(f"{place.name}.damaged"))
    notify(f"{place} was moved to {beside}")


def _size(folder: Path) -> int:
    files = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    return sum(os.path.getsize(file) for file in files if os.path.isfile(file))
