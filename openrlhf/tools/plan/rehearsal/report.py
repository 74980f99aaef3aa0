"""Rehearses a training run with shrunk models, and prints the result (`openrlhf rehearse`)."""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from openrlhf.api import Command, notify, readable
from openrlhf.tools.command_line.terminal import build_console, build_table, say
from openrlhf.tools.plan.estimate import Assumed, RunPlan
from openrlhf.tools.plan.hardware import Cluster
from openrlhf.tools.plan.rehearsal.settings import not_rehearsed
from openrlhf.tools.plan.rehearsal.stages import FAILED, OK, Rehearsal
from openrlhf.tools.plan.view import GIB, batch_lines, binding_lines


def run(command: Command, config: Any, cluster: Cluster, options: argparse.Namespace) -> int:
    """Rehearses the run in a temporary folder. Returns 0 if nothing failed, else 1."""
    folder, started = Path(tempfile.mkdtemp(prefix="openrlhf-rehearsal-")), time.monotonic()
    rehearsal = Rehearsal(
        command=command,
        config=config,
        cluster=cluster,
        assumed=Assumed.of(options),
        folder=folder,
        tell=Progress(started),
    )
    try:
        rehearsal.run()
    finally:
        if options.keep:
            notify(f"logs and models: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - started
    if options.json:
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


STYLES = {OK: "green", FAILED: "bold red"}


def show(rehearsal: Rehearsal, seconds: float, stream: TextIO) -> None:
    console = build_console(stream)

    table = build_table("", "stage", "outcome", "seconds", "evidence", right=("seconds",))
    for stage in rehearsal.stages:
        outcome = Text(stage.outcome, style=STYLES.get(stage.outcome, "yellow"))
        first = stage.evidence.partition("\n")[0]
        table.add_row(stage.name, outcome, f"{stage.seconds:.0f}", Text(readable(first)))
    console.print(table)
    for stage in rehearsal.stages:
        if stage.outcome == FAILED and "\n" in stage.evidence:
            say(console, readable(f"\n{stage.name}: {stage.evidence}"))
    if rehearsal.small is not None:
        say(console, "\nnot rehearsed")
        for line in not_rehearsed(rehearsal.config, rehearsal.small):
            say(console, f"  {line}")
    for line in _figures(rehearsal):
        say(console, line)
    failed = [stage.name for stage in rehearsal.stages if stage.outcome == FAILED]
    verdict = f"failed: {', '.join(failed)}" if failed else "all stages that were rehearsed succeeded"
    say(console, f"\n{verdict} ({seconds:.0f} s)", "bold " + ("red" if failed else "green"))


def _figures(rehearsal: Rehearsal) -> Iterator[str]:
    plan, small = rehearsal.plan, rehearsal.small_plan
    if plan is None:
        return
    yield f"\nplan of the run on {plan.cluster}"
    if small is not None:
        for (name, rehearsed), (_, whole) in zip(_list_changes(small), _list_changes(plan), strict=True):
            yield f"  {name:<28} {whole:>16}   rehearsed with {rehearsed}"
    for line in (*batch_lines(plan), *binding_lines(plan)):
        yield f"  {line}"


def _list_changes(plan: RunPlan) -> Iterator[tuple[str, str]]:
    first = next(iter(plan.sizes.values()))
    yield "parameters", f"{first.parameters:,}"
    yield "data-parallel ranks", f"{plan.batches.ranks:,}"
    yield "samples of a step", f"{plan.batches.samples:,}"
    yield "samples of an optimizer step", f"{plan.batches.batch_size:,}"
    yield "memory of a device, GiB", f"{plan.tightest.total / GIB:.3g}"
    yield "seconds of a step", f"{plan.seconds:.3g}"


def as_data(rehearsal: Rehearsal, seconds: float) -> dict[str, Any]:
    small = rehearsal.small
    plans = {"plan": rehearsal.plan, "rehearsed": rehearsal.small_plan}
    return {
        "command": rehearsal.command.name,
        "ok": not rehearsal.failed,
        "seconds": seconds,
        "stages": [asdict(stage) for stage in rehearsal.stages],
        "not_rehearsed": [] if small is None else [*not_rehearsed(rehearsal.config, small)],
        **{name: None if plan is None else dict(_list_changes(plan)) for name, plan in plans.items()},
    }
