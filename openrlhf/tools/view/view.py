"""Serves the page of runs (`openrlhf view`)."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from openrlhf.api import ErrorCode, RunFolder, UsageError, counted
from openrlhf.tools.view.rollouts import token_texts
from openrlhf.tools.view.server import Viewer, bind, serve


def run(paths: Sequence[Path], port: int, opens_browser: bool) -> None:
    """Serves the page of the runs in these folders until Ctrl-C."""
    folders = runs_of(paths)
    bound = bind(port)

    def say(address: str) -> None:
        print(f"{counted(len(folders), 'run')} at {address}\nEnd with Ctrl-C", flush=True)
        if opens_browser:
            webbrowser.open(address)

    serve(Viewer(folders, token_texts), bound, say)


def runs_of(paths: Sequence[Path]) -> list[Path]:
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
