"""Records the rollouts of a run: the journal, tables of a few for the trackers, and lines on the screen."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openrlhf.api import (
    Decode,
    Evaluation,
    Hook,
    Journal,
    Observer,
    Step,
    TrainedSamples,
    Trajectory,
    best_to_worst,
    commonest_failure,
    decode_response,
    format_number,
    headline,
    shorten,
)

SAMPLES_IN_TABLE = 8


SAMPLES_PRINTED = 4


def few_samples(trajectories: Sequence[Trajectory], limit: int = SAMPLES_PRINTED) -> list[Trajectory]:
    """Returns trajectories evenly spaced from best to worst reward, then failures if there is room."""
    return [trajectories[i] for i in best_to_worst([t.reward for t in trajectories], limit)]


def print_samples(samples: Sequence[Trajectory], decode: Decode, *, stream: TextIO | None = None) -> None:
    """Prints samples as a table on a terminal, as plain lines in a file."""
    stream = stream or sys.stdout
    rows = [
        (
            "–" if t.reward is None else format_number(t.reward),
            f"{t.num_actions}{' cut' if t.truncated else ''}",
            shorten(t.prompt.text, 300, keep_end=True),
            shorten(decode_response(t, decode) if t.ok else f"{t.outcome.value}: {t.error}", 500),
        )
        for t in samples
    ]
    if stream.isatty():
        table = Table(title="samples", show_lines=True, expand=True)
        for column, ratio in (("reward", None), ("tokens", None), ("prompt", 2), ("answer", 3)):
            table.add_column(column, justify="left" if ratio else "right", ratio=ratio)
        for row in rows:
            table.add_row(*map(Text, row))
        Console(file=stream).print(table)
        return
    for reward, tokens, prompt, answer in rows:
        print(f"--- reward {reward}  tokens {tokens}", file=stream)
        print(f"prompt: {prompt}\nanswer: {answer}", file=stream, flush=True)


class Rollouts(Hook):
    """Writes the samples of each step and evaluation. A failed step is recorded, too."""

    observer: Observer

    def __post_init__(self) -> None:
        run = self.observer
        mode: Any = getattr(run.logger, "rollouts", "full")  # a flag of RL alone
        self.samples: dict[str, list[Trajectory]] = {}
        """A few samples of the last training step (`step`), the last evaluation (`eval`) and dynamic
        filtering (`filtered`)."""
        self.journal = Journal(run.folder.rollouts_path, decode=run.decode, mode=mode, report=run.message)

    def trained(self, step: Step) -> None:
        if step.samples:
            batch, schedule = step.batch, step.schedules.get("policy", [])
            trained = None
            if step.updated is not None and batch is not None:
                trained = TrainedSamples(batch=batch, schedule=schedule, first_update=step.optimizer_steps)
            self.write(step.number, step.samples, trained=trained)
        if step.filtered:
            self.write(step.number, step.filtered, name="filtered")

    def evaluated(self, evaluation: Evaluation) -> None:
        self.write(evaluation.step, evaluation.samples, name="eval")

    def write(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        name: str = "step",
        trained: TrainedSamples | None = None,
    ) -> None:
        """Journals trajectories, and logs a table of a few. `name`: `step` for training, `filtered` for
        samples that dynamic filtering dropped, `eval` for an evaluation."""
        path = self.journal.write(step, trajectories, name=name, trained=trained)
        self._tell_failures(trajectories, path)
        self.samples[name] = few_samples(trajectories)
        decode = self.observer.decode
        rows = [
            [
                t.prompt.text,
                decode_response(t, decode) if decode else "",
                t.reward if t.ok else t.outcome.value,
                t.truncated,
            ]
            for t in trajectories[:: max(1, len(trajectories) // SAMPLES_IN_TABLE)][:SAMPLES_IN_TABLE]
        ]
        columns = ["prompt", "response", "reward", "truncated"]
        self.observer.trackers.table(step, f"{name}_samples", columns, rows)

    def saving(self, tag: str) -> None:
        """Waits for the disk: a run that resumes from the checkpoint does not write these rollouts again."""
        self.journal.flush()

    def closing(self) -> None:
        with self.observer.phase("write rollouts"):
            self.journal.close()

    def closed(self) -> None:
        """Prints a few samples of the last evaluation, or of the last step if there was none."""
        shown = self.samples.get("eval") or self.samples.get("step")
        if self.observer.decode and shown:  # none if all samples were filtered
            print_samples(shown, self.observer.decode)

    def _tell_failures(self, trajectories: Sequence[Trajectory], path: Path | None) -> None:
        failed = [t for t in trajectories if not t.ok]
        if not failed:
            return
        example, count = commonest_failure(failed)
        decode = self.observer.decode
        same = "" if count == len(failed) else f", {count} of them with"
        prompt = shorten(example.prompt.text, 120, keep_end=True)
        answer = shorten(decode_response(example, decode), 120) if decode else ""
        self.observer.message(
            f"{len(failed)} of {len(trajectories)} samples failed{same}: {shorten(headline(example), 240)} | "
            f"prompt {prompt!r}, answer {answer!r}{f' | {path.name}' if path else ''}"
        )
