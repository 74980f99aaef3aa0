"""Shows the progress of a run: bars on a terminal, elsewhere plain lines without control characters.

`Progress` prints lines of steps above bars of the run and of each phase. Quick steps share a line: one a
second on a terminal, elsewhere one every 5 seconds, with the means of the steps since the last line. In a
file, a long phase reports its progress every 10 seconds.

    with Progress() as progress:
        progress.start(total_steps)
        for step in range(1, total_steps + 1):
            with progress.phase("generate", total=256) as phase:
                phase.advance(8, tokens_per_second=9012)
            metrics |= progress.step(step, metrics)    # timing/generate, timing/step_total

Only the process that logs shows progress. Other ranks use Progress(show=False), which still measures times.
"""

import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TextIO

from openrlhf.observability.formats import clean_text, format_duration, format_number
from openrlhf.observability.phases import Phase
from openrlhf.observability.waits import LINE_EVERY, is_terminal, print_plain, terminal_bars

if TYPE_CHECKING:
    from openrlhf.observability.bars import TerminalBars
    from openrlhf.types import Metrics

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
STEPS_EVERY, STEPS_EVERY_ON_TERMINAL = 5.0, 1.0
"""Seconds between two lines of quick steps."""


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
        if is_terminal(self._stream):
            self._bars = terminal_bars(self._stream)
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
            print_plain(text, self._stream)
            self._last_line = time.monotonic()


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


def pass_name(name: str) -> str | None:
    """Returns the name of the pass@k metric that equals a mean (k = 1) or best-of-k of scores if all scores
    are 0 or 1; None for other metrics."""
    found = re.search(r"_(?:score_mean|best_of(\d+))$", name)
    return f"{name[: found.start()]}_pass{found[1] or 1}" if found else None


def is_evaluation(name: str) -> bool:
    """Returns True if a metric of this name is measured on held-out data."""
    return name.startswith(("eval/", "eval_"))
