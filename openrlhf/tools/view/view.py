"""Serves the page of runs (`openrlhf view`)."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from openrlhf.api import counted
from openrlhf.tools.command_line.runs import find_runs
from openrlhf.tools.view.rollouts import token_texts
from openrlhf.tools.view.server import Viewer, bind, serve


def run(paths: Sequence[Path], port: int, opens_browser: bool) -> None:
    """Serves the page of the runs in these folders until Ctrl-C."""
    folders = find_runs(paths)
    bound = bind(port)

    def say(address: str) -> None:
        print(f"{counted(len(folders), 'run')} at {address}\nEnd with Ctrl-C", flush=True)
        if opens_browser:
            webbrowser.open(address)

    serve(Viewer(folders, token_texts), bound, say)
