"""Rehearses a training run with shrunk models, and prints what happened (`openrlhf rehearse`)."""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from openrlhf.api import Command, notify
from openrlhf.tools.plan.estimate import Assumed
from openrlhf.tools.plan.hardware import Cluster
from openrlhf.tools.plan.rehearsal.report import as_data, show
from openrlhf.tools.plan.rehearsal.stages import Rehearsal


def run(command: Command, config: Any, cluster: Cluster, options: argparse.Namespace) -> int:
    """Rehearses the run in a temporary folder. Returns 0 if nothing failed, else 1."""
    folder, assumed = Path(tempfile.mkdtemp(prefix="openrlhf-rehearsal-")), Assumed.of(options)
    try:
        return rehearse(command, config, cluster, assumed, folder, as_json=options.json)
    finally:
        if options.keep:
            notify(f"logs and models: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def rehearse(
    command: Command,
    config: Any,
    cluster: Cluster,
    assumed: Assumed,
    folder: Path,
    *,
    as_json: bool,
) -> int:
    """Rehearses the run in `folder` and prints the result. Returns 0 if nothing failed, else 1."""
    started = time.monotonic()
    rehearsal = Rehearsal(
        command=command,
        config=config,
        cluster=cluster,
        assumed=assumed,
        folder=folder,
        tell=Progress(started),
    )
    rehearsal.run()
    seconds = time.monotonic() - started
    if as_json:
        print(json.dumps(as_data(rehearsal, seconds), indent=2))
    else:
        show(rehearsal, seconds, sys.stdout)
    return 1 if rehearsal.failed else 0


EVERY = 15.0
"""Minimum seconds between two progress lines of a stage."""


class Progress:
    """Prints the current stage and its remaining time on stderr."""

    def __init__(self, started: float) -> None:
        self.started, self.said = started, 0.0

    def __call__(self, name: str, seconds: float, expected: float) -> None:
        now = time.monotonic()
        if seconds and now - self.said < EVERY:
            return
        self.said = now
        left = f", about {max(expected - seconds, 1):.0f} s left" if seconds < expected else ""
        of_stage = f" ({seconds:.0f} s{left})" if expected else ""
        print(f"[{now - self.started:4.0f} s] {name}{of_stage}", file=sys.stderr, flush=True)
