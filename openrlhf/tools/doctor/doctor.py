"""Examines the installation or a run, and prints what it found (`openrlhf doctor`)."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from openrlhf.tools.command_line.installation import facts
from openrlhf.tools.command_line.runs import find_run
from openrlhf.tools.command_line.terminal import build_console
from openrlhf.tools.doctor.diagnose import as_json, diagnose, is_healthy, show
from openrlhf.tools.doctor.record import RunRecord


def examine_installation(as_data: bool) -> int:
    """Prints the facts of the installation and their problems. Returns 1 if there are problems, else 0."""
    found = list(facts())
    problems = [fact for fact in found if fact.problem]
    if as_data:
        print(json.dumps({"healthy": not problems, "facts": [asdict(fact) for fact in found]}, indent=2))
        return int(bool(problems))
    console = build_console(sys.stdout)
    table = Table.grid(padding=(0, 2))
    for fact in found:
        mark = Text("wrong", "bold red") if fact.problem else Text("ok", "green")
        table.add_row(mark, Text(fact.name), Text(fact.found))
    console.print(table)
    for fact in problems:
        console.print(Text(f"\n{fact.name}: {fact.problem}", "bold red"), soft_wrap=True)
        console.print(Text(f"  remedy: {fact.remedy}", "green"), soft_wrap=True)
    if not problems:
        console.print(Text("\nnothing is wrong", "bold green"))
    return int(bool(problems))


def examine_run(path: Path, model: Path | None = None, as_data: bool = False) -> int:
    """Prints the findings of a run. Returns 1 if anything is wrong, else 0, also if it is slow."""
    run = RunRecord(find_run(path))
    findings = diagnose(run, model)
    if as_data:
        print(as_json(run, findings))
    else:
        show(run, findings, sys.stdout)
    return int(not is_healthy(findings))
