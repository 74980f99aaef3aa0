"""Shows the progress of long operations: bars on a terminal, elsewhere plain lines without control
characters.

`Progress` is for a run. It prints lines of steps above bars of the run and of each phase. Quick steps share a
line: one a second on a terminal, elsewhere one every 5 seconds, with the means of the steps since the last
line. In a file, any other long operation reports its progress every 10 seconds.

    with Progress() as progress:
        progress.start(total_steps)
        for step in range(1, total_steps + 1):
            with progress.phase("generate", total=256) as phase:
                phase.advance(8, tokens_per_second=9012)
            metrics |= progress.step(step, metrics)    # timing/generate, timing/step_total

Only the process that logs shows progress. Other ranks use Progress(show=False), which still measures times.

Outside the steps of a run, `tracked` (for loops) and `waiting` (for operations without countable parts) print
to stderr."""

import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from openrlhf.errors import is_first_of_machine, warn_once
from openrlhf.files import cache_folder, write_atomically

if TYPE_CHECKING:
    from openrlhf.observability.bars import TerminalBars
    from openrlhf.types import Metrics  # its module imports torch

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")

KEY_METRICS = {
    **{
        f"{command}/{name}": name
        for command in ("sft", "rm", "prm", "dpo", "kto", "kd")
        for name in ("loss", "accuracy", "kl")
    },
    "rollout/reward_mean": "reward",
    "rollout/response_length_mean": "length",
    "rollout/truncated_rate": "truncated",
    "rollout/failed_ratio": "failed",
    "rollout/kept_ratio": "kept",
    "reward/zero_std_fraction": "uniform",
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
"""Metric on a step's line -> its label there. Metrics of evaluations are on the line too."""

LEGEND = {
    "uniform": "fraction of samples whose whole group has one reward",
    "gap": "mean difference of log-probs, sampler and trainer",
}
"""Labels that do not explain themselves -> their meaning, which the first line with them is followed by."""

EVALUATION_METRICS_SHOWN = 6
EVALUATION_DETAILS = ("num_samples", "response_length_mean", "truncated_rate")
"""Suffixes of evaluation metrics that are not on the line."""
ETA_STEPS = 50

LINE_EVERY = 10.0
"""Seconds without output after which a file gets a line."""
STEPS_EVERY, STEPS_EVERY_ON_TERMINAL = 5.0, 1.0
"""Seconds between two lines of quick steps."""
LOOP_PATIENCE, WAIT_PATIENCE = 2.0, 1.0
"""Seconds after which the bar of a loop appears, and the first output about a wait."""
CHECK_PATIENCE = 4.0
"""Seconds after which a file gets the first line about checks. Checks often fail earlier, and then only the
error is printed."""
DURATIONS_KEPT = 200
"""Number of waits whose durations are remembered."""


class Progress(AbstractContextManager["Progress"]):
    """Progress of a run. `phase`, `advance` and `message` may be called from any thread."""

    def __init__(
        self,
        *,
        show: bool = True,
        stream: TextIO | None = None,
        plain_seconds: float = LINE_EVERY,
        now: Callable[[], float] = time.monotonic,
    ):
        """`plain_seconds`: seconds without output after which a file gets a line."""
        self._stream = stream or sys.stdout
        self._show = show
        self._plain_seconds = plain_seconds
        self._now = now
        self._lock = threading.Lock()
        self._phases: list[Phase] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = StepClock(now=now())
        self._pending: list[tuple[int, Metrics, Mapping[str, float]]] = []
        """Number, metrics and seconds by phase of each step that is not printed yet."""
        self._last_report = now()
        self._unexplained = dict(LEGEND)
        self._bars: TerminalBars | None = None
        self._closed = threading.Event()
        self._last_line = time.monotonic()

    def start(self, total_steps: int | None = None, *, done: int = 0, since: float | None = None) -> None:
        """Starts the clock. `total_steps`: None if it is unknown, 0 if there are only phases. `done`: steps
        before a resume. `since`: time of the monotonic clock at which the first step began; None: now."""
        self._clock = StepClock(total=total_steps, done=done, now=self._now() if since is None else since)
        if not self._show:
            return
        if _is_terminal(self._stream):
            self._bars = _terminal_bars(self._stream)
            self._bars.add_run(total_steps, done)
        else:
            self._last_line = time.monotonic()
            threading.Thread(target=self._report_long_phases, name="progress", daemon=True).start()

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator["Phase"]:
        """Measures a part of a step, whose seconds become `timing/{name}`. Phases may overlap, nest and
        repeat; seconds of the same name add up."""
        phase = Phase(name=clean_text(name), total=total, now=self._now)
        with self._lock:
            self._phases.append(phase)
        if self._bars:
            self._bars.show(phase)
        try:
            yield phase
        finally:
            with self._lock:
                self._phases.remove(phase)
                self._seconds[name] += phase.elapsed
            if self._bars:
                self._bars.remove_phase(phase)

    def step(self, step: int, metrics: "Metrics") -> "Metrics":
        """Finishes a step and returns the `timing/` metrics since the last one.

        Prints the line of the first step, the last step and steps with evaluation metrics at once. Other
        steps may share the line of a later one."""
        total = self._clock.finish(step, self._now())
        with self._lock:
            seconds, self._seconds = self._seconds | {"step_total": total}, defaultdict(float)
        if self._show:
            with self._lock:
                self._pending.append((step, dict(metrics), seconds))
            if self._is_line_due(metrics):
                self._print_steps()
            if self._bars:
                self._bars.step(step, self._clock.eta())
        return {f"timing/{name}": value for name, value in seconds.items()}

    def message(self, text: str) -> None:
        """Prints a line above the bars, after the line of pending steps. Removes control characters from
        `text`."""
        if self._show:
            self._print_steps()
            self._print(text)

    def close(self) -> None:
        self._print_steps()
        self._closed.set()
        if self._bars:
            self._bars.stop()
            self._bars = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_line_due(self, metrics: "Metrics") -> bool:
        every = STEPS_EVERY_ON_TERMINAL if self._bars else STEPS_EVERY
        is_old = self._now() - self._last_report >= every
        return is_old or self._clock.is_at_an_end or any(map(is_evaluation, metrics))

    def _print_steps(self) -> None:
        """Prints one line for all pending steps."""
        with self._lock:
            pending, self._pending = self._pending, []
        if not pending:
            return
        numbers, metrics, seconds = zip(*pending, strict=True)
        of_total = f"/{self._clock.total}" if self._clock.total else ""
        steps = f" ({len(pending)} steps)" if len(pending) > 1 else ""
        chosen = self._chosen({name: sum(values) / len(values) for name, values in _by_name(metrics).items()})
        figures = [f"{name} {format_number(value)}" for name, value in chosen]
        each = {name: format_duration(sum(s) / len(pending)) for name, s in _by_name(seconds).items()}
        total = each.pop("step_total")
        phases = " + ".join(f"{name} {text}" for name, text in each.items())
        eta = self._clock.eta()
        left = f"eta {format_duration(eta)}" if eta else ""
        parts = [f"step {numbers[-1]}{of_total}{steps}", *figures, phases, f"total {total}", left]
        self._print("  ".join(filter(None, parts)))
        meanings = {label: self._unexplained.pop(label, "") for label, _ in chosen}
        if legend := "; ".join(f"{label}: {meaning}" for label, meaning in meanings.items() if meaning):
            self._print(f"  {legend}")
        self._last_report = self._now()

    def _chosen(self, metrics: "Metrics") -> list[tuple[str, float]]:
        """Returns (label, value) of the metrics on the line."""
        chosen = [(label, metrics[name]) for name, label in KEY_METRICS.items() if name in metrics]
        evaluation = [
            (name, value)
            for name, value in metrics.items()
            if is_evaluation(name)
            and not name.endswith(EVALUATION_DETAILS)
            and pass_name(name) not in metrics
        ]
        return chosen + evaluation[:EVALUATION_METRICS_SHOWN]

    def _report_long_phases(self) -> None:
        wait = self._plain_seconds
        while not self._closed.wait(wait) and not self._stream.closed:
            silent = time.monotonic() - self._last_line
            wait = self._plain_seconds - silent
            if wait > 0:
                continue
            with self._lock:
                lines = [phase.line() for phase in self._phases]
            if lines := lines or self._clock.lines(self._now()):
                self._print("  " + " · ".join(lines))
            wait = self._plain_seconds

    def _print(self, text: str) -> None:
        text = clean_text(text)
        if self._bars:
            self._bars.write(text)
            return
        with self._lock:
            _print_plain(text, self._stream)
            self._last_line = time.monotonic()


@dataclass(eq=False, slots=True)
class Phase:
    """Progress and elapsed time of a part of a step."""

    name: str
    total: int | None
    done: int = 0
    figures: dict[str, float | str] = field(default_factory=dict)
    now: Callable[[], float] = time.monotonic
    started: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.started = self.now()

    @property
    def elapsed(self) -> float:
        return self.now() - self.started

    def advance(self, count: int = 1, **figures: float | str) -> None:
        """Adds `count` finished parts of `total`. `figures` are shown until they are replaced."""
        with self._lock:
            self.done += count
            self.figures = self.figures | figures

    def line(self) -> str:
        of_total = f"/{self.total:,}" if self.total else ""
        count = f" {self.done:,}{of_total}" if self.total or self.done else ""
        return f"{self.name}{count} {format_duration(self.elapsed)}{self.figures_text()}"

    def figures_text(self) -> str:
        return "".join(
            f" {name} {value if isinstance(value, str) else format_number(value)}"
            for name, value in self.figures.items()
        )


def _by_name(steps: "Iterable[Metrics]") -> dict[str, list[float]]:
    """Returns the values of each metric in the steps that report it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (item for step in steps for item in step.items()):
        values[name].append(value)
    return values


class StepClock:
    """Measures seconds per step and estimates the remaining time from the mean of the last steps."""

    def __init__(self, total: int | None = None, done: int = 0, *, now: float):
        self.total = total
        self._done = done
        self._last = now
        self._per_step: deque[float] = deque(maxlen=ETA_STEPS)
        self._num_finished = 0

    def finish(self, step: int, now: float) -> float:
        """Finishes a step and returns the seconds since the last call, or since the start. Steps may be
        skipped."""
        seconds, self._last = now - self._last, now
        if step > self._done:
            if self._num_finished == 1:
                # The first step compiles and warms up, so later steps replace it in the estimate.
                self._per_step.clear()
            self._num_finished += 1
            self._per_step.append(seconds / (step - self._done))
            self._done = step
        return seconds

    @property
    def is_at_an_end(self) -> bool:
        """True if the finished step is the first or the last one."""
        return self._num_finished == 1 or self._done == self.total

    def lines(self, now: float) -> list[str]:
        """Returns a line about the current step, if there is one."""
        if self.total is not None and self._done >= self.total:
            return []
        return [f"step {self._done + 1} {format_duration(now - self._last)}"]

    def eta(self) -> float | None:
        """Returns the estimated remaining seconds; None if they are unknown or no step is left."""
        if not self.total or not self._per_step or self._done >= self.total:
            return None
        return (self.total - self._done) * sum(self._per_step) / len(self._per_step)


def tracked(
    items: Iterable[ItemT],
    total: int | None,
    title: str,
    *,
    stream: TextIO | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Generator[ItemT, None, None]:
    """Yields the items unchanged and shows progress: a bar that disappears at the end, or a line every 10
    seconds in a file. A loop of less than 2 seconds shows nothing. Only the first process of a machine
    prints. `total`: None if the number of items is unknown."""
    if not is_first_of_machine():
        yield from items
        return
    phase, stream = Phase(name=clean_text(title), total=total, now=now), stream or sys.stderr
    bars = _terminal_bars(stream, transient=True) if _is_terminal(stream) else None
    due = LOOP_PATIENCE if bars else LINE_EVERY
    try:
        for item in items:
            yield item
            phase.done += 1
            if phase.elapsed < due:
                continue
            phase.figures = _rate(phase)
            if bars:
                bars.show(phase)
            else:
                _print_plain(phase.line(), stream)
            due = phase.elapsed + (0.1 if bars else LINE_EVERY)
    finally:
        if bars:
            bars.stop()


@contextmanager
def waiting(
    title: str, *, key: str = "", patience: float | None = None, stream: TextIO | None = None
) -> Iterator[None]:
    """Reports on stderr that the block runs, its elapsed time, and its duration the last time. Only rank 0
    prints.

    Args:
        title: name of the operation, such as `starting 2 rollout engines`.
        key: other things that determine the duration, such as the model. Durations are stored by title and
            key in the cache folder.
        patience: seconds before the first line in a file; None: `WAIT_PATIENCE`, as on a terminal.
        stream: stream to print to; None: stderr.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    name = f"{title} {key}".strip()
    last = _durations().get(name)
    before = "" if last is None else f" (last time {format_duration(last)})"
    phase = Phase(name=clean_text(title) + before, total=None)
    ended = threading.Event()
    arguments = (phase, stream or sys.stderr, ended, patience or WAIT_PATIENCE)
    thread = threading.Thread(target=_report_wait, args=arguments, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # bounded: it prints one line
    if phase.elapsed >= WAIT_PATIENCE:
        _remember(name, phase.elapsed)


def checking() -> AbstractContextManager[None]:
    """Shows a progress line while models and data are validated."""
    return waiting("checking models and data", patience=CHECK_PATIENCE)


def _report_wait(phase: Phase, stream: TextIO, ended: threading.Event, patience: float) -> None:
    is_terminal = _is_terminal(stream)
    if ended.wait(WAIT_PATIENCE if is_terminal else patience):
        return
    if is_terminal:
        with _terminal_bars(stream, transient=True) as bars:
            bars.show(phase)
            ended.wait()  # bounded: by the wait that it shows
        return
    _print_plain(phase.line(), stream)
    while not ended.wait(LINE_EVERY):
        _print_plain(phase.line(), stream)


def _durations() -> dict[str, float]:
    """Returns the stored seconds of each wait, the newest last; {} if the file cannot be read."""
    try:
        return json.loads(_durations_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _remember(name: str, seconds: float) -> None:
    known = {other: value for other, value in _durations().items() if other != name}
    newest = list({**known, name: round(seconds, 2)}.items())[-DURATIONS_KEPT:]
    path = _durations_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [json.dumps(dict(newest), indent=0)], shared=True)
    except OSError as error:
        warn_once(logger, f"durations of starts cannot be stored in {path}: {error.strerror or error}")


def _durations_path() -> Path:
    return cache_folder() / "durations.json"


def _rate(phase: Phase) -> dict[str, float | str]:
    figures: dict[str, float | str] = {"rate": f"{format_number(phase.done / phase.elapsed)}/s"}
    if phase.total is not None:
        left = max(0, phase.total - phase.done) * phase.elapsed / phase.done
        figures["eta"] = format_duration(left)
    return figures


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _print_plain(text: str, stream: TextIO) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=stream, flush=True)


def clean_text(text: str) -> str:
    """Removes control characters (except newline and tab) and marks that reverse the reading order, because
    they could act on a terminal. Replaces lone surrogates, which no stream can encode, by question marks."""
    return _CONTROL.sub("", text).encode("utf-8", "replace").decode("utf-8")


def shorten(text: str, limit: int, *, keep_end: bool = False) -> str:
    text = clean_text(text).strip()
    if len(text) <= limit:
        return text
    # The question is at the end of a long prompt; an answer keeps its beginning and its conclusion.
    head = limit // 4 if keep_end else limit * 2 // 3
    return f"{text[:head]} […{len(text) - limit:,} characters…] {text[len(text) - (limit - head) :]}"


def format_number(value: float) -> str:
    """Formats a number with three to four digits: 0.0123, 12.3, 1,234, 56.7k, 1e-06."""
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
    return f"{value:,.0f}" if size >= 999.5 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Formats a duration: 12ms, 1.2s, 34s, 3m12s, 2h05m, 3d04h."""
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


def _terminal_bars(stream: TextIO, *, transient: bool = False) -> "TerminalBars":
    from openrlhf.observability.bars import TerminalBars  # late: rich takes longer than parsing flags

    return TerminalBars(stream, transient=transient)


def pass_name(name: str) -> str | None:
    """Returns the name of the pass@k metric that equals a mean (k = 1) or best-of-k of scores if all scores
    are 0 or 1; None for other metrics."""
    found = re.search(r"_(?:score_mean|best_of(\d+))$", name)
    return f"{name[: found.start()]}_pass{found[1] or 1}" if found else None


def is_evaluation(name: str) -> bool:
    """Returns True if a metric of this name is measured on held-out data."""
    return name.startswith(("eval/", "eval_"))
