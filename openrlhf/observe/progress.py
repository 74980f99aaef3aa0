"""What a run prints. On a terminal: bars of the run and of each phase, with one line per step above them.
In a file: one plain line per step and, in a long phase, one every 10 seconds; no control characters.

    with Progress() as progress:
        progress.start(total_steps)
        for step in range(1, total_steps + 1):
            with progress.phase("generate", total=256) as phase:
                phase.advance(8, tokens_per_second=9012)
            metrics |= progress.step(step, metrics)    # timing/generate, timing/step_total

Only the driver shows progress. Other ranks use Progress(show=False), which still takes the times.
"""

import math
import os
import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from openrlhf.types import Metrics

KEY_METRICS = {
    "sft/loss": "loss",
    "rm/loss": "loss",
    "rm/accuracy": "accuracy",
    "prm/loss": "loss",
    "prm/accuracy": "accuracy",
    "dpo/loss": "loss",
    "dpo/accuracy": "accuracy",
    "kto/loss": "loss",
    "kto/accuracy": "accuracy",
    "kto/kl": "kl",
    "kd/loss": "loss",
    "kd/kl": "kl",
    "rollout/reward_mean": "reward",
    "rollout/response_length_mean": "length",
    "rollout/truncated_rate": "truncated",
    "rollout/failed_ratio": "failed",
    "rollout/kept_ratio": "kept",
    "policy/loss": "loss",
    "policy/ppo_kl": "ppo_kl",
    "policy/entropy": "entropy",
    "critic/loss": "critic_loss",
    "critic/explained_variance": "explained",
    "kl/mean": "kl",
    "mismatch/abs_diff_mean": "gap",
    "grad_norm": "grad_norm",
    "lr": "lr",
}
"""Metrics on the line of a step, and what they are called there. Evaluations are shown too."""

EVALUATION_METRICS_SHOWN = 6
EVALUATION_DETAILS = ("num_samples", "response_length_mean", "truncated_rate")
"""What evaluations also report; not on the line."""
ETA_STEPS = 50


class Progress:
    """`phase` and `advance` may be called from any thread."""

    def __init__(
        self,
        *,
        show: bool = True,
        stream: TextIO | None = None,
        key_metrics: Mapping[str, str] = KEY_METRICS,
        plain_seconds: float = 10.0,
    ):
        self._stream = stream or sys.stdout
        self._show = show
        self._key_metrics = key_metrics
        self._plain_seconds = plain_seconds
        self._lock = threading.Lock()
        self._phases: list[Phase] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = StepClock()
        self._bars: _TerminalBars | None = None
        self._closed = threading.Event()
        self._last_line = time.monotonic()

    def start(self, total_steps: int | None = None, *, done: int = 0) -> None:
        """Begin counting time. `done` steps were made before a resume. None: the number is not known.
        0: there are no steps, only phases."""
        self._clock = StepClock(total=total_steps, done=done)
        if not self._show:
            return
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._bars = _TerminalBars(self._stream, total_steps, done)
        else:
            self._last_line = time.monotonic()
            threading.Thread(target=self._report_long_phases, name="progress", daemon=True).start()

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator["Phase"]:
        """A part of a step. Its seconds become `timing/{name}`. Phases may overlap, nest and repeat: seconds
        of the same name add up."""
        phase = Phase(name=clean_text(name), total=total)
        with self._lock:
            self._phases.append(phase)
        if self._bars:
            self._bars.add_phase(phase)
        try:
            yield phase
        finally:
            with self._lock:
                self._phases.remove(phase)
                self._seconds[name] += phase.elapsed
            if self._bars:
                self._bars.remove_phase(phase)

    def step(self, step: int, metrics: Metrics) -> Metrics:
        """Print the line of a finished step. Returns the `timing/` metrics since the last one."""
        total = self._clock.finish(step)
        with self._lock:
            phase_seconds, self._seconds = self._seconds, defaultdict(float)
        if self._show:
            of_total = f"/{self._clock.total}" if self._clock.total else ""
            figures = [f"{name} {format_number(value)}" for name, value in self._chosen(metrics)]
            phases = " + ".join(f"{name} {format_duration(s)}" for name, s in phase_seconds.items())
            eta = self._clock.eta()
            left = f"eta {format_duration(eta)}" if eta else ""
            parts = [f"step {step}{of_total}", *figures, phases, f"total {format_duration(total)}", left]
            self._print("  ".join(filter(None, parts)))
            if self._bars:
                self._bars.step(step, eta)
        timing = {f"timing/{name}": seconds for name, seconds in phase_seconds.items()}
        return timing | {"timing/step_total": total}

    def message(self, text: str) -> None:
        """Print a line that does not disturb the bars. `text` may come from anywhere: it is cleaned."""
        if self._show:
            self._print(text)

    def close(self) -> None:
        self._closed.set()
        if self._bars:
            self._bars.stop()
            self._bars = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chosen(self, metrics: Metrics) -> list[tuple[str, float]]:
        """(label, value) of what is worth a place on the line."""
        chosen = [(label, metrics[name]) for name, label in self._key_metrics.items() if name in metrics]
        evaluation = [
            (name, value)
            for name, value in metrics.items()
            if _is_evaluation(name)
            and not name.endswith(EVALUATION_DETAILS)
            and pass_name(name) not in metrics
        ]
        return chosen + evaluation[:EVALUATION_METRICS_SHOWN]

    def _report_long_phases(self) -> None:
        wait = self._plain_seconds
        while not self._closed.wait(wait):
            silent = time.monotonic() - self._last_line
            wait = self._plain_seconds - silent
            if wait > 0:
                continue
            with self._lock:
                lines = [phase.line() for phase in self._phases]
            if lines:
                self._print("  " + " · ".join(lines))
            wait = self._plain_seconds

    def _print(self, text: str) -> None:
        text = clean_text(text)
        if self._bars:
            self._bars.console.print(Text(text), highlight=False)
            return
        with self._lock:
            print(f"{time.strftime('%H:%M:%S')} {text}", file=self._stream, flush=True)
            self._last_line = time.monotonic()


@dataclass(eq=False, slots=True)
class Phase:
    name: str
    total: int | None
    done: int = 0
    figures: dict[str, float | str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def advance(self, count: int = 1, **figures: float | str) -> None:
        """`count` more of `total` are done. `figures` are shown until they are replaced."""
        with self._lock:
            self.done += count
            self.figures = self.figures | figures

    def line(self) -> str:
        count = f" {self.done}/{self.total}" if self.total else f" {self.done}" if self.done else ""
        return f"{self.name}{count} {format_duration(self.elapsed)}{self.figures_text()}"

    def figures_text(self) -> str:
        return "".join(
            f" {name} {value if isinstance(value, str) else format_number(value)}"
            for name, value in self.figures.items()
        )


class StepClock:
    """Seconds per step, and how long the remaining steps will take at the mean of the last ones."""

    def __init__(self, total: int | None = None, done: int = 0, now: float | None = None):
        self.total = total
        self._done = done
        self._last = time.monotonic() if now is None else now
        self._per_step: deque[float] = deque(maxlen=ETA_STEPS)
        self._num_finished = 0

    def finish(self, step: int, now: float | None = None) -> float:
        """Seconds since the last call, or since the start. Steps may be skipped."""
        now = time.monotonic() if now is None else now
        seconds, self._last = now - self._last, now
        if step > self._done:
            if self._num_finished == 1:
                # The first step compiles and warms up: it says little about the others.
                self._per_step.clear()
            self._num_finished += 1
            self._per_step.append(seconds / (step - self._done))
            self._done = step
        return seconds

    def eta(self) -> float | None:
        """Seconds. None when it is not known or nothing is left."""
        if not self.total or not self._per_step or self._done >= self.total:
            return None
        return (self.total - self._done) * sum(self._per_step) / len(self._per_step)


def clean_text(text: str) -> str:
    """`text` without what could act on a terminal: control characters but newline and tab, and the marks that
    reverse reading order. Lone surrogates, which no stream can encode, become question marks."""
    return _CONTROL.sub("", text).encode("utf-8", "replace").decode("utf-8")


def format_number(value: float) -> str:
    """Three to four digits: 0.0123, 12.3, 1,234, 56.7k, 1e-06."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == int(value) and size < 10_000:
        return f"{int(value):,}"
    if size >= 10_000:
        for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if limit <= size < limit * 1000:
                return f"{value / limit:.3g}{unit}" if size < limit * 999.5 else f"{value / limit:.0f}{unit}"
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """12ms, 1.2s, 34s, 3m12s, 2h05m, 3d04h."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class _TerminalBars(Bars):
    """A bar for the run and one for each running phase, below the lines that are printed."""

    def __init__(self, stream: TextIO, total_steps: int | None, done: int):
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description:<12}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(file=stream, force_terminal=True),
            refresh_per_second=4,
        )
        self._task_ids: dict[Phase, TaskID] = {}
        has_steps = total_steps != 0
        self._run = self.add_task(
            "step", total=total_steps, completed=done, note="", phase=None, visible=has_steps
        )
        self.start()

    def add_phase(self, phase: Phase) -> None:
        self._task_ids[phase] = self.add_task(phase.name, total=phase.total, note="", phase=phase)

    def remove_phase(self, phase: Phase) -> None:
        self.remove_task(self._task_ids.pop(phase))

    def step(self, step: int, eta: float | None) -> None:
        self.update(self._run, completed=step, note=f"eta {format_duration(eta)}" if eta else "")

    def get_renderables(self) -> Iterable[RenderableType]:
        """Called by rich for each refresh, so that `advance` costs nothing."""
        for task in self.tasks:
            if phase := task.fields["phase"]:
                task.completed = phase.done
                task.fields["note"] = clean_text(format_duration(phase.elapsed) + phase.figures_text())
        yield from super().get_renderables()


def pass_name(name: str) -> str | None:
    """Under which name a mean or the best of k of scores is reported once more where all are 0 or 1."""
    found = re.search(r"_(?:score_mean|best_of(\d+))$", name)
    return f"{name[: found.start()]}_pass{found[1] or 1}" if found else None


def _is_evaluation(name: str) -> bool:
    return name.startswith(("eval/", "eval_"))
