"""Finds the run folders that the paths on a command line name."""

from collections.abc import Sequence
from pathlib import Path

from openrlhf.api import ErrorCode, RunFolder, UsageError, notify


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


def _last_change(run: Path) -> float:
    files = [run / "metrics.jsonl", run / "argv.txt"]
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)
