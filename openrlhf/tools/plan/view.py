"""Predicts what a training run needs, and prints it as tables or JSON (`openrlhf plan`)."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from openrlhf.api import FITS, Command, counted, format_duration
from openrlhf.api import layout_table as placement_table
from openrlhf.tools.command_line.terminal import build_console, build_table, say
from openrlhf.tools.plan.estimate import Assumed, RunPlan, advice, plan_run, spelled
from openrlhf.tools.plan.hardware import Cluster
from openrlhf.tools.plan.memory import PARTS, Demand

GIB = 2**30
MOST_LINES = 24
"""Maximum number of lines that the placement takes."""


def run(command: Command, config: Any, cluster: Cluster, options: argparse.Namespace) -> int:
    """Prints the plan. Returns 0 if the run fits, else 1."""
    plan = plan_run(command, config, cluster, Assumed.of(options))
    if options.json:
        print(json.dumps(as_data(plan), indent=2))
    else:
        show(plan, sys.stdout)
    return 0 if plan.fits else 1


def show(plan: RunPlan, stream: TextIO) -> None:
    console, style = build_console(stream), "bold green" if plan.fits else "bold red"
    say(console, f"{plan.command.name} on {plan.cluster}: {_verdict(plan)}", style)
    console.print(_models(plan))
    if plan.layout is not None:
        say(console, f"\nplacement\n{_shortened(placement_table(plan.layout))}")
    say(console, "\nbatches")
    for line in batch_lines(plan):
        say(console, line)
    for found in _memory(plan.memory):
        console.print(found)
    console.print(_time(plan))
    say(console, "")
    for line in binding_lines(plan):
        say(console, line)


def _shortened(table: str) -> str:
    lines = table.splitlines()
    if len(lines) <= MOST_LINES:
        return "\n".join(lines)
    first, left_out = lines[: MOST_LINES - 2], len(lines) - MOST_LINES + 1
    return "\n".join([*first, f"... {left_out} more lines, which --print_plan shows", lines[-1]])


def _verdict(plan: RunPlan) -> str:
    if plan.starved and all(demand.fits for demand in plan.memory):
        return "does not fit (no room for the KV cache of the longest sequence)"
    return "fits" if plan.fits else "does not fit"


def _table(title: str, *columns: str) -> Table:
    return build_table(title, *columns, right=columns[1:])


def _models(plan: RunPlan) -> Table:
    found = _table("models", "model", "parameters", "active per token", "roles")
    roles: dict[Any, list[str]] = {}
    for role, size in plan.sizes.items():
        roles.setdefault(size, []).append(role)
    for size, names in roles.items():
        unit, name = (1e9, "B") if size.parameters >= 1e7 else (1e6, "M")
        counts = (f"{count / unit:,.3f} {name}" for count in (size.parameters, size.active))
        found.add_row(Text(size.path), *counts, ", ".join(names))
    return found


def batch_lines(plan: RunPlan) -> Iterator[str]:
    b, tokens = plan.batches, plan.lengths
    prompt, response = (" (assumed)" * (name in tokens.assumed) for name in ("prompt", "response"))
    if plan.layout is not None:
        yield (
            f"step: {counted(b.prompts, 'prompt')} x {counted(b.samples // b.prompts, 'sample')} = "
            f"{counted(b.samples, 'sample')}; {counted(b.updates, 'optimizer step')} of "
            f"{counted(b.batch_size, 'sample')}"
        )
        yield f"tokens of a sample: prompt {tokens.prompt:,}{prompt} + response {tokens.response:,}{response}"
    else:
        yield f"step: {b.prompts:,} items, {b.samples:,} sequences; one optimizer step"
        yield f"tokens of a sequence: {tokens.response:,}{response}"
    yield (
        f"each of {b.ranks:,} data-parallel ranks: {b.samples_per_rank:,.4g} samples of an optimizer step in "
        f"{counted(b.rows_per_rank, 'row')} of up to {b.row_tokens:,} tokens"
    )
    if b.steps is not None and b.rows is not None:
        time = format_duration(b.steps * plan.seconds)
        yield f"run: {counted(b.rows, 'row')}, {counted(b.steps, 'step')}, {time}"


def _memory(demands: Sequence[Demand]) -> Iterator[Table]:
    for (devices, count), group in groupby(demands, lambda demand: (demand.devices, demand.count)):
        some = list(group)
        names = [name for name in PARTS if any(demand.parts.get(name) for demand in some)]
        each = "the device" if count == 1 else f"each of {count} devices"
        title = f"memory of {each} with {devices}, GiB of {some[0].capacity / GIB:.1f}"
        found = _table(title, "phase", *names, "all", "share")
        for demand in some:
            cells = [_gib(demand.parts.get(name, 0)) for name in names]
            share = Text(f"{demand.share:.0%}", style="" if demand.fits else "red")
            found.add_row(demand.phase, *cells, _gib(demand.total), share)
        yield found


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= 0.05 * GIB or not size else f"{size / GIB:.1g}"


def _time(plan: RunPlan) -> Table:
    found = _table("time of a step", "phase", "seconds", "share", "bound by")
    whole = sum(phase.seconds for phase in plan.time)
    for phase in plan.time:
        found.add_row(phase.name, f"{phase.seconds:.3g}", f"{phase.seconds / whole:.0%}", phase.bound)
    overlap = " (sampling beside training)" if plan.seconds < whole * 0.999 else ""
    found.add_row(f"step{overlap}", f"{plan.seconds:.3g}", style="bold")
    return found


def binding_lines(plan: RunPlan) -> Iterator[str]:
    tight, slow = plan.tightest, plan.slowest
    part = max(tight.parts, key=lambda name: tight.parts[name])
    yield (
        f"memory: tightest in {tight.phase}, {tight.share:.0%} of a device, most of it {part} "
        f"({_gib(tight.parts[part])} GiB)"
    )
    yield f"time: longest phase {slow.name}, bound by {slow.bound}; remedy: {advice(plan)}"
    if plan.fits:
        return
    if plan.suggestion is None:
        yield (
            "suggestion: the flags that save memory do not suffice; use more or larger GPUs, a smaller model "
            "or a smaller --data.max_len"
        )
        return
    changes, fitting = plan.suggestion
    yield (
        f"suggestion: {spelled(changes)}\n  then {fitting.tightest.share:.0%} in {fitting.tightest.phase}, "
        f"{fitting.seconds:.3g} s a step"
    )


def as_data(plan: RunPlan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "command": plan.command.name,
        "cluster": {
            "nodes": plan.cluster.nodes,
            "per_node": plan.cluster.per_node,
            "kind": plan.cluster.kind.name,
            "memory": plan.cluster.kind.memory,
        },
        "fits": plan.fits,
        "models": {
            role: {"path": size.path, "parameters": size.parameters, "active": size.active}
            for role, size in plan.sizes.items()
        },
        "placement": None
        if layout is None
        else {role: [list(device) for device in place.devices] for role, place in layout.roles.items()},
        "tokens": {
            "prompt": plan.lengths.prompt,
            "response": plan.lengths.response,
            "assumed": bool(plan.lengths.assumed),
        },
        "batches": asdict(plan.batches),
        "memory": [
            {name: getattr(demand, name) for name in ("devices", "count", "phase", "total", "share", "fits")}
            | {"parts": dict(demand.parts)}
            for demand in plan.memory
        ],
        "usable": FITS,
        "time": [
            {"phase": phase.name, "seconds": phase.seconds, "bound": phase.bound} for phase in plan.time
        ],
        "step_seconds": plan.seconds,
        "advice": advice(plan),
        "suggestion": None if plan.suggestion is None else dict(plan.suggestion[0]),
    }
