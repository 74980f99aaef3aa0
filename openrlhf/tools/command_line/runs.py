"""Finds the run folders that the paths on a command line name, and the files that a run's flags name."""

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from openrlhf.api import LOCK_FILE as LOCK
from openrlhf.api import ErrorCode, RunFolder, RunIndex, UsageError, notify

_OWNER = re.compile(r"process (\d+) on (\S+), since (\S+ \S+) UTC")


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Returns the run folders that paths name: each itself, or those below. Raises UsageError for others."""
    found: list[Path] = []
    for path in paths:
        is_run = RunFolder(path).is_run
        below = (inner for inner in path.glob("**/") if "previous" not in inner.relative_to(path).parts)
        inside = [path] if is_run else sorted(inner for inner in below if RunFolder(inner).is_run)
        if not inside:
            text = "is no run folder and has none inside; give the folder of a run (--logger.run_dir)"
            raise UsageError(ErrorCode.NOT_FOUND, text, value=path)
        found += [folder for folder in inside if folder not in found]
    return found


def find_run(path: Path) -> Path:
    """Returns the run folder that a path names: itself, or the newest run below it, which a note names.
    Raises UsageError if there is none."""
    found = find_runs([path])
    newest = max(found, key=_last_change)
    if len(found) > 1:
        notify(f"note: {path} has {len(found)} runs; this is the newest, {newest}")
    return newest


@dataclass(frozen=True, slots=True)
class Owner:
    """The process of a run's last start, which the lock names."""

    pid: int
    host: str
    since: datetime

    @property
    def is_here(self) -> bool:
        return self.host == platform.node()


class PlacedRun(RunIndex):
    """A run whose relative paths are found from every folder."""

    @property
    def owner(self) -> Owner | None:
        """Process that started the run; None if there is no lock file."""
        if (match := _OWNER.match(self.read(LOCK))) is None:
            return None
        since = datetime.strptime(match[3], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        return Owner(int(match[1]), match[2], since)

    def wrote_last(self, name: str) -> bool:
        """Returns True if the last start of the run wrote this file; True too for an earlier start if there
        is no lock file."""
        path, owner = self.path / name, self.owner
        return path.exists() and (owner is None or path.stat().st_mtime >= owner.since.timestamp())

    @property
    def working_directory(self) -> Path:
        """The folder to which the run's relative paths refer, if it follows from a relative `logger.run_dir`;
        else the current folder."""
        flags, whole = self.flags, self.path.resolve()
        default = f"{flags.get('ckpt.output_dir')}/runs/{flags.get('logger.wandb.run_name')}"
        named = Path(flags.get("logger.run_dir") or default)
        if not named.is_absolute() and whole.parts[-len(named.parts) :] == named.parts:
            return Path(*whole.parts[: -len(named.parts)])
        return Path.cwd()

    @property
    def checkpoint_folder(self) -> Path:
        named = self.flags.get("ckpt.path") or Path(self.flags.get("ckpt.output_dir") or "", "checkpoints")
        return self.working_directory / named

    def locate(self, name: str) -> str:
        """Returns the file or folder that a flag of the run names, or else the name, which may be a hub's."""
        path = self.working_directory / name
        return str(path) if name and path.exists() else name


def _last_change(run: Path) -> float:
    files = [run / "metrics.jsonl", run / "argv.txt"]
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)
