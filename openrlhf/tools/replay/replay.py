"""Computes a step of a recorded run again, and compares it (`openrlhf replay`); finds the first difference
between two recorded runs, or two commits (`openrlhf bisect`)."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from openrlhf.api import ErrorCode, UsageError
from openrlhf.tools.command_line.runs import find_run
from openrlhf.tools.replay.commits import Repository, bisect_commits
from openrlhf.tools.replay.compare import bisect
from openrlhf.tools.replay.recorded import RecordedRun
from openrlhf.tools.replay.rerun import Rerun, compare
from openrlhf.tools.replay.view import Screen


def run(path: Path, step: int, folder: Path | None = None) -> int:
    """Prints the comparison. Returns 0 if everything is equal, else 1."""
    recorded = RecordedRun(find_run(path))
    _ = recorded.flags  # raises if the folder is no run
    with ExitStack() as held:
        if folder is None:
            folder = Path(held.enter_context(TemporaryDirectory(prefix="openrlhf_replay_")))
        elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            text = f"is {'not empty' if folder.is_dir() else 'not a folder'}; name a new folder"
            raise UsageError(ErrorCode.NOT_WRITABLE, text, flag="--folder", value=folder)
        rerun = Rerun(run=recorded, step=step, folder=folder.resolve())
        rerun.check()
        folder.mkdir(parents=True, exist_ok=True)
        rerun.compute()
        result = compare(rerun)
        Screen(sys.stdout).replay(rerun, result)
    return 0 if result.is_equal else 1


def bisect_runs(a: Path, b: Path) -> int:
    """Prints the first difference of two runs. Returns 0 if there is none, else 1."""
    a, b = find_run(a), find_run(b)
    runs = RecordedRun(a), RecordedRun(b)
    commands = [run.command for run in runs]
    _ = [run.flags for run in runs]  # raises if a folder is not a run
    if commands[0] != commands[1]:
        text = f"a run of `openrlhf {commands[1]}`, but {a} is one of `openrlhf {commands[0]}`"
        raise UsageError(ErrorCode.CONFLICT, text, flag="RUN_B", value=b)
    result = bisect(*runs)
    Screen(sys.stdout).bisection(result, (str(a), str(b)))
    return 0 if result.are_equal else 1


def bisect_versions(
    path: Path, names: Sequence[str], step: int | None = None, repository: Path | None = None
) -> int:
    recorded = RecordedRun(path := find_run(path))
    _ = recorded.flags  # raises if the folder is no run
    step = max(recorded.steps, default=0) if step is None else step
    clone = Repository.around(repository)
    commits = [clone.commit(name) for name in names]
    with TemporaryDirectory(prefix="openrlhf_bisect_") as temporary:
        folder = Path(temporary).resolve()
        reruns = [
            Rerun(run=recorded, step=step, folder=folder / side, code=folder / f"{side}_code", saves=True)
            for side in ("good", "bad")
        ]
        reruns[0].check()
        result = bisect_commits(reruns, commits, clone)
        print(f"{path}: step {step} computed by two commits, from {reruns[0].beginning}")
        Screen(sys.stdout).bisection(result, (str(commits[0]), str(commits[1])))
    return 0 if result.are_equal else 1
