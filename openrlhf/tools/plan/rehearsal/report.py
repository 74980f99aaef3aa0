"""Prints the result of a rehearsal, or returns it as plain data."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TextIO

from rich.text import Text

from openrlhf.api import readable
from openrlhf.tools.command_line.terminal import build_console, build_table
from openrlhf.tools.plan.estimate import RunPlan, suggestion
from openrlhf.tools.plan.rehearsal.settings import not_rehearsed
from openrlhf.tools.plan.rehearsal.stages import FAILED, OK, Rehearsal
from openrlhf.tools.plan.view import GIB, batch_lines, binding_lines

STYLES = {OK: "green", FAILED: "bold red"}


def show(rehearsal: Rehearsal, seconds: float, stream: TextIO) -> None:
    """Prints the stages, the features that were not rehearsed, and the plan."""
    console = build_console(stream)
    say = lambda text, style="": console.print(Text(readable(text), style=style), soft_wrap=True)
    table = build_table("", "stage", "outcome", "seconds", "evidence", right=("seconds",))
    for stage in rehearsal.stages:
        outcome = Text(stage.outcome, style=STYLES.get(stage.outcome, "yellow"))
        first = stage.evidence.partition("\n")[0]
        table.add_row(stage.name, outcome, f"{stage.seconds:.0f}", Text(readable(first)))
    console.print(table)
    for stage in rehearsal.stages:
        if stage.outcome == FAILED and "\n" in stage.evidence:
            say(f"\n{stage.name}: {stage.evidence}")
    if rehearsal.small is not None:
        say("\nnot rehearsed")
        for line in not_rehearsed(rehearsal.config, rehearsal.small):
            say(f"  {line}")
    for line in _figures(rehearsal):
        say(line)
    failed = [stage.name for stage in rehearsal.stages if stage.outcome == FAILED]
    verdict = f"failed: {', '.join(failed)}" if failed else "all stages that were rehearsed succeeded"
    say(f"\n{verdict} ({seconds:.0f} s)", "bold " + ("red" if failed else "green"))


def _figures(rehearsal: Rehearsal) -> Iterator[str]:
    """Yields lines with the numbers of the run's plan, and of the rehearsal's beside them."""
    plan, small = rehearsal.plan, rehearsal.small_plan
    if plan is None:
        return
    yield f"\nplan of the run on {plan.cluster}"
    if small is not None:
        for (name, rehearsed), (_, whole) in zip(_list_changes(small), _list_changes(plan), strict=True):
            yield f"  {name:<28} {whole:>16}   rehearsed with {rehearsed}"
    suggested = None
    if not plan.fits:
        suggested = suggestion(rehearsal.command, rehearsal.config, rehearsal.cluster, rehearsal.assumed)
    for line in (*batch_lines(plan), *binding_lines(plan, rehearsal.config, suggested)):
        yield f"  {line}"


def _list_changes(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Yields (name, value) of the numbers that a rehearsal makes smaller."""
    first = next(iter(plan.sizes.values()))
    yield "parameters", f"{first.parameters:,}"
    yield "data-parallel ranks", f"{plan.batches.ranks:,}"
    yield "samples of a step", f"{plan.batches.samples:,}"
    yield "samples of an optimizer step", f"{plan.batches.batch_size:,}"
    yield "memory of a device, GiB", f"{plan.tightest.total / GIB:.3g}"
    yield "seconds of a step", f"{plan.seconds:.3g}"


def as_data(rehearsal: Rehearsal, seconds: float) -> dict[str, Any]:
    """Returns the rehearsal as JSON values."""
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
