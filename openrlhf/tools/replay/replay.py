"""Computes a step of a recorded run again, and compares it (`openrlhf replay`)."""

import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from openrlhf.api import ErrorCode, UsageError
from openrlhf.tools.command_line.runs import find_run
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
