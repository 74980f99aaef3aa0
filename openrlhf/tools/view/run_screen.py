"""Renders the state of a run on one screen: steps, phases, curves, sampling, warnings, newest samples."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from openrlhf.api import (
    KEY_METRICS,
    clean_text,
    evenly,
    format_duration,
    format_number,
    is_evaluation,
    pass_name,
)
from openrlhf.tools.view.followed_run import FollowedRun, Sample

if TYPE_CHECKING:
    from openrlhf.api import Metrics  # its module imports torch

WIDE = 110
"""Minimum width of a screen, in columns, on which panels are side by side."""
CURVES, TIMELINE_STEPS, WARNINGS = 14, 8, 3
"""Maximum numbers of curves, of steps on the timeline, and of warnings."""
ENGINES_SHOWN = 32
"""Largest number of engines whose requests are listed."""
SAMPLE_LINES = 12
"""Number of lines of the panel of samples if the screen has no fixed height."""
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
"""Levels of a sparkline."""
PHASES = {
    "generate": "green",
    "logprobs": "cyan",
    "update": "blue",
    "sync": "magenta",
    "evaluate": "yellow",
    "save": "red",
}
"""Phase of a step -> colour on the timeline."""
OTHER = "other"
"""Time of a step outside all phases."""
STATES = {"running": "bold green", "ended": "bold", "died": "bold red", "unknown": "bold yellow"}
ENGINES = {
    "rollout/num_prompts": "prompts requested",
    "rollout/buffered_groups": "groups waiting for a later step",
    "rollout/num_samples": "samples",
    "rollout/staleness_mean": "staleness",
    "rollout/staleness_max": "maximum staleness",
    "rollout/kept_ratio": "kept by filtering",
    "rollout/engine_restarts": "engines replaced",
}
"""Metric of sampling -> its name on the screen."""


def frame(run: FollowedRun, width: int, height: int | None = None, *, ascii_only: bool = False) -> Group:
    """Returns the screen of a run.

    Args:
        run: the run, after a `refresh`.
        width: number of columns of the screen. Panels are side by side from `WIDE` columns on.
        height: number of lines of the screen, which samples fill; None: show a few samples.
        ascii_only: True for a terminal without block characters.
    """
    parts = [header(run, width), *filter(None, [queues(run)])]
    if run.steps:
        left, right = curves(run, ascii_only=ascii_only), [timeline(run), engines(run)]
        if width >= WIDE:
            grid = Table.grid(expand=True)
            grid.add_column(ratio=1)
            grid.add_column(ratio=1)
            grid.add_row(left, Group(*filter(None, right)))
            parts.append(grid)
        else:
            parts += [left, *filter(None, right)]
    parts += filter(None, [health(run)])
    console, room = Console(width=width, legacy_windows=False), SAMPLE_LINES
    if height is not None:
        options = console.options.update(width=width)
        room = height - sum(len(console.render_lines(part, options)) for part in parts)
    if (run.samples or run.samples_error) and room >= 4:
        parts.append(samples(run, room - 2))
    return Group(*parts)


def header(run: FollowedRun, width: int) -> RenderableType:
    total, last = run.folder.total_steps, run.last_step
    state = "finished" if run.state == "ended" and total and last >= total else run.state
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f" {state} ", style=f"reverse {STATES[run.state]}")
    line.append(f"  step {last:,}{f' of {total:,}' if total else ''}")
    if total:
        done = round(20 * min(1.0, last / total))
        line.append("  [" + "=" * done + " " * (20 - done) + "]", style="dim")
    if run.eta:
        line.append(f"  eta {format_duration(run.eta)}")
    if (seconds := run.seconds_per_step) is not None:
        line.append(f"  {format_duration(seconds)} a step")
    if (age := run.age) is not None:
        late = run.state == "running" and seconds is not None and age > 60 + 3 * seconds
        what = "last step" if run.steps else "began"
        line.append(f"  {what} {format_duration(age)} ago", style="bold red" if late else "")
    lines = [line, *_notes(run)]
    title = Text(_one_line(run.folder.path.resolve().name), style="bold")
    model = Text(_one_line(run.model), style="dim")
    return Panel(Group(*lines), title=title, subtitle=model if run.model else None, title_align="left")


def _notes(run: FollowedRun) -> Iterator[Text]:
    if not run.steps and run.state == "running":
        yield Text("no step is finished yet")
    if run.start:
        stages = {name.removeprefix("start/"): value for name, value in run.start.items()}
        total = stages.pop("total", 0.0)
        parts = ", ".join(f"{clean_text(name)} {value:.0f}" for name, value in stages.items())
        yield Text(f"started in {total:.0f} s ({parts})", style="dim", no_wrap=True, overflow="ellipsis")
    if run.state == "died":
        text = (
            "the process ended without a report: it was killed, or its machine is gone; `openrlhf doctor` "
            "names causes"
        )
        yield Text(text, style="red")
    if run.num_unreadable:
        text = f"{run.num_unreadable} lines of metrics.jsonl or health.jsonl are not JSON and left out"
        yield Text(text, style="red")


def curves(run: FollowedRun, *, ascii_only: bool) -> RenderableType:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, max_width=28)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="dim")
    for name, label in chosen_metrics(run.steps.values()):
        values = [metrics[name] for metrics in run.steps.values() if name in metrics]
        finite = [value for value in values if math.isfinite(value)]
        span = f"{format_number(min(finite))} .. {format_number(max(finite))}" if finite else ""
        table.add_row(
            Text(_one_line(label)),
            Text(format_number(values[-1]), style="bold"),
            Sparkline(values, ascii_only=ascii_only),
            Text(span),
        )
    steps = f"of steps {min(run.steps):,} to {run.last_step:,}" if run.steps else ""
    return Panel(table, title=f"curves {steps}", title_align="left")


def chosen_metrics(rows: "Iterable[Metrics]") -> list[tuple[str, str]]:
    """Returns (name, label) of the metrics with a curve, scores of evaluations first."""
    names = dict.fromkeys(name for metrics in rows for name in metrics)
    endings = ("_pass1", "_score_mean", "_loss", "_accuracy", "/loss", "/accuracy")
    scores = [name for name in names if is_evaluation(name) and name.endswith(endings)]
    scores = [name for name in scores if pass_name(name) in (None, name) or pass_name(name) not in names]
    found = [(name, name) for name in scores[:3]]
    found += [(name, label) for name, label in KEY_METRICS.items() if name in names]
    return found[:CURVES]


class Sparkline:
    """A curve on one line, as wide as the available space. NaN and infinities are gaps."""

    def __init__(self, values: "Sequence[float]", *, ascii_only: bool) -> None:
        self._values, self._blocks = values, ASCII_BLOCKS if ascii_only else BLOCKS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(self.text(options.max_width), style="cyan", no_wrap=True)

    def text(self, width: int) -> str:
        """Returns the curve in at most `width` characters. Each character shows the mean of its steps."""
        values = self._values
        parts = np.array_split(values, max(1, min(width, len(values))))
        parts = [[value for value in part.tolist() if math.isfinite(value)] for part in parts if len(part)]
        means = [sum(part) / len(part) if part else None for part in parts]
        finite = [mean for mean in means if mean is not None]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        scale = (len(self._blocks) - 1) / (high - low) if high > low else 0.0
        return "".join(" " if m is None else self._blocks[round((m - low) * scale)] for m in means)


def timeline(run: FollowedRun) -> RenderableType | None:
    """Returns the panel with a bar for each of the last steps that have times; None if none has."""
    rows = [(step, sum_phases(m)) for step, m in run.steps.items() if "timing/step_total" in m]
    rows = rows[-TIMELINE_STEPS:]
    if not rows:
        return None
    names = dict.fromkeys(name for _, phases in rows for name in phases)
    styles, letters = {}, {}
    for name in names:
        free = [c for c in [*name.lower(), *"xyz"] if c.isalnum() and c not in letters.values()]
        letters[name] = "." if name == OTHER else next(iter(free), "?")
        styles[name] = f"black on {PHASES.get(name, 'white')}" if name != OTHER else "dim"
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    longest = max(sum(phases.values()) for _, phases in rows)
    for step, phases in rows:
        parts = [(letters[name], styles[name], seconds / longest) for name, seconds in phases.items()]
        table.add_row(f"{step:,}", PhaseBar(parts), format_duration(run.steps[step]["timing/step_total"]))
    legend = Text()
    for name in names:
        mean = sum(phases.get(name, 0.0) for _, phases in rows) / len(rows)
        legend.append(letters[name], style=styles[name])
        legend.append(f"={_one_line(name)} {format_duration(mean)}  ")
    return Panel(Group(table, legend), title="phases of the last steps", title_align="left")


def sum_phases(metrics: "Metrics") -> "Metrics":
    """Returns the seconds of each phase of a step, and of the time outside all phases if phases do not
    overlap."""
    phases = {
        name.removeprefix("timing/"): seconds
        for name, seconds in metrics.items()
        if name.startswith("timing/") and name != "timing/step_total" and seconds >= 0
    }
    phases = {name: seconds for name, seconds in phases.items() if math.isfinite(seconds)}
    phases = dict(sorted(phases.items(), key=lambda item: [*PHASES, item[0]].index(item[0])))
    rest = metrics["timing/step_total"] - sum(phases.values())
    return phases | ({OTHER: rest} if math.isfinite(rest) and rest > 0 else {})


class PhaseBar:
    """A bar of coloured letters. Its parts are (letter, style, fraction of the available width)."""

    def __init__(self, parts: Sequence[tuple[str, str, float]]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        text, end = Text(no_wrap=True), 0.0
        for letter, style, share in self._parts:
            end += share * options.max_width
            text.append(letter * max(0, round(end) - len(text)), style=style)
        yield text


def queues(run: FollowedRun) -> RenderableType | None:
    if not run.queues:
        return None
    known = [queue for queue in run.queues if queue is not None]
    lines = [f"all {sum(running for running, _ in known)} running, {sum(w for _, w in known)} waiting"]
    for i, queue in enumerate(run.queues[:ENGINES_SHOWN]):
        lines.append(f"{i}: starting" if queue is None else f"{i}: {queue[0]} running, {queue[1]} waiting")
    if len(run.queues) > ENGINES_SHOWN:
        lines.append(f"{len(run.queues) - ENGINES_SHOWN} more engines")
    return Panel(Text(" · ".join(lines)), title="requests of the engines now", title_align="left")


def engines(run: FollowedRun) -> RenderableType | None:
    """Returns the panel about sampling in the last step; None in supervised learning."""
    metrics = next((m for m in reversed(run.steps.values()) if "rollout/num_samples" in m), None)
    if metrics is None:
        return None
    seconds = metrics.get("timing/generate", 0.0)
    length = metrics.get("rollout/response_length_mean", math.nan)
    rate = metrics["rollout/num_samples"] * length / seconds if seconds > 0 else math.nan
    parts = [f"response tokens a second {format_number(rate)}"] if math.isfinite(rate) else []
    parts += [f"{label} {format_number(metrics[name])}" for name, label in ENGINES.items() if name in metrics]
    memory = [
        f"{_one_line(name[7:-3])} {format_number(value)}"
        for name, value in metrics.items()
        if name.startswith("memory/") and name.endswith("_gb")
    ]
    parts += [f"peak memory in GB: {', '.join(memory)}"] if memory else []
    return Panel(Text(" · ".join(parts)), title="sampling in the last step", title_align="left")


def health(run: FollowedRun) -> RenderableType | None:
    if not run.warnings:
        return None
    lines = []
    for step, text in run.warnings[-WARNINGS:]:
        line = Text(f"step {step:,}  ", style="bold", no_wrap=False)
        lines.append(line.append(_one_line(text)[:400], style="yellow"))
    more = len(run.warnings) - len(lines)
    title = f"unhealthy ({more} earlier in health.jsonl)" if more > 0 else "unhealthy"
    return Panel(Group(*lines), title=title, title_align="left", border_style="yellow")


def samples(run: FollowedRun, lines: int) -> RenderableType:
    """Returns the panel with the newest samples, two lines for each, in `lines` lines."""
    texts: list[Text] = []
    if run.samples_error:
        texts.append(Text(_one_line(run.samples_error), style="red", no_wrap=True, overflow="ellipsis"))
    for row in evenly(run.samples, max(1, lines // 2)):
        texts += _sample(row)
    title = Text(f"samples of {_one_line(run.samples_file)}, best to worst")
    return Panel(Group(*texts[: max(2, lines)]), title=title, title_align="left")


def _sample(row: Sample) -> Iterator[Text]:
    reward = row.get("reward")
    head = Text(no_wrap=True, overflow="ellipsis")
    if reward is None:
        head.append(f"{row.get('outcome') or 'failed'} ", style="bold red")
        head.append(_one_line(row.get("error") or ""), style="red")
    else:
        head.append(f"{format_number(reward)} ", style="bold")
        head.append(f"{_one_line(row.get('finish_reason') or '')} ", style="dim")
    head.append(_tail(_one_line(row.get("prompt") or ""), 120), style="dim")
    yield head
    answer = row.get("response")
    answer = "(not decoded)" if answer is None else _one_line(answer[:2000])
    yield Text(f"  {answer}", no_wrap=True, overflow="ellipsis")


def _tail(text: str, length: int) -> str:
    return text if len(text) <= length else f"...{text[-length:]}"


def _one_line(text: object) -> str:
    return " ".join(clean_text(str(text)).split())
