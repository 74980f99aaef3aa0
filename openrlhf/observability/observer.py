"""The single interface to a run's output: the screen, the files of the run folder, and trackers."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from openrlhf.algorithms.mismatch import MismatchWatch
from openrlhf.config.choices import JournalMode
from openrlhf.config.sections import LoggerConfig, is_due
from openrlhf.observability.failures import commonest_failure, headline
from openrlhf.observability.health import Health
from openrlhf.observability.hooks.base import Evaluation, Hook, Step
from openrlhf.observability.journal import Decode, Journal, Trained, response_of
from openrlhf.observability.progress import Phase, Progress
from openrlhf.observability.rollout_metrics import rollout_metrics
from openrlhf.observability.run_folder import RunFolder, to_json
from openrlhf.observability.samples import few_samples, print_samples, shorten
from openrlhf.observability.startup import StartClock
from openrlhf.observability.trackers.base import TrackedRun
from openrlhf.observability.trackers.load import open_trackers
from openrlhf.observability.trackers.metrics_file import JsonlTracker
from openrlhf.observability.trackers.mirrors import Trackers
from openrlhf.plugins import registered
from openrlhf.types import Metrics, Trajectory

SAMPLES_IN_TABLE = 8
logger = logging.getLogger(__name__)


class Observer(Hook):
    """Reports a run. It exists only in the process that logs for all ranks. Of the loop's events it takes
    the samples, evaluations and metrics."""

    def __init__(
        self,
        folder: RunFolder,
        logger: LoggerConfig,
        *,
        resume_step: int | None = None,
        decode: Decode | None = None,
        rollouts: JournalMode = "full",
        mismatch: MismatchWatch | None = None,
        missing_template: str = "",
    ) -> None:
        """`resume_step`: the restored step; None for a fresh run. `rollouts`: the rollouts that the journal
        keeps. `mismatch`: comparison of sampler and trainer; None in supervised learning.
        `missing_template`: see `signs_of`."""
        self.folder, self.logger, self.decode = folder, logger, decode
        if resume_step is not None:
            folder.rewind(resume_step)
        self.progress = Progress()
        self.health = Health(mismatch=mismatch, missing_template=missing_template)
        self.step = resume_step or 0
        self.samples: dict[str, list[Trajectory]] = {}
        """A few samples of the last training step (`step`), the last evaluation (`eval`) and dynamic
        filtering (`filtered`)."""
        self.journal = Journal(folder.rollouts_path, decode=decode, mode=rollouts, report=self.message)
        run = TrackedRun(folder=folder, logger=logger, resume_step=resume_step)
        self.trackers = Trackers(JsonlTracker(folder.metrics_path), open_trackers(run))
        self._of_start: Metrics = {}
        """Metrics of the run's start, until they are logged with the first row of metrics."""

    def start(self, total_steps: int, done: int = 0) -> None:
        self.folder.write_total(total_steps)
        self.progress.start(total_steps, done=done)

    def started(self, clock: StartClock) -> None:
        """Prints the seconds of each stage of the start, and adds them to the next row of metrics."""
        self.message(clock.line())
        self._of_start = clock.metrics()

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        with self.progress.phase(name, total) as self.current:
            yield self.current

    def advance(self, count: int) -> None:
        """Advances the current phase by `count`."""
        self.current.advance(count)

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Reports a step: prints its line, logs its metrics, and warns about unhealthy ones. Call it once a
        step."""
        self.step = step
        metrics = metrics | self.progress.step(step, metrics)
        for text in self.health.check(metrics):
            self._warn(step, text)
        if step == 0 or is_due(step, self.logger.logging_steps):
            self.trackers.log(step, metrics | self._of_start)
            self._of_start = {}

    def log_rollouts(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        name: str = "step",
        trained: Trained | None = None,
    ) -> None:
        """Journals trajectories, and logs a table of a few. `name`: `step` for training, `filtered` for
        samples that dynamic filtering dropped, `eval` for an evaluation."""
        path = self.journal.write(step, trajectories, name=name, trained=trained)
        self._tell_failures(trajectories, path)
        self.samples[name] = few_samples(trajectories)
        rows = [
            [
                t.prompt.text,
                response_of(t, self.decode) if self.decode else "",
                t.reward if t.ok else t.outcome.value,
                t.truncated,
            ]
            for t in trajectories[:: max(1, len(trajectories) // SAMPLES_IN_TABLE)][:SAMPLES_IN_TABLE]
        ]
        self.trackers.table(step, f"{name}_samples", ["prompt", "response", "reward", "truncated"], rows)

    def sampled(self, step: Step) -> None:
        step.metrics |= rollout_metrics(step.samples, step.version)

    def trained(self, step: Step) -> None:
        if step.samples:
            batch, schedule = step.batch, step.schedules.get("policy", [])
            trained = None
            if step.updated is not None and batch is not None:
                trained = Trained(batch=batch, schedule=schedule, first_update=step.optimizer_steps)
            self.log_rollouts(step.number, step.samples, trained=trained)
        if step.filtered:
            self.log_rollouts(step.number, step.filtered, name="filtered")

    def evaluated(self, evaluation: Evaluation) -> None:
        self.log_rollouts(evaluation.step, evaluation.samples, name="eval")

    def saving(self, tag: str) -> None:
        """Waits until all rollouts are on disk: a run that resumes from the checkpoint does not write them
        again."""
        self.journal.flush()

    def ended(self, step: Step) -> None:
        self.log_step(step.number, step.metrics)

    def _tell_failures(self, trajectories: Sequence[Trajectory], path: Path | None) -> None:
        """Prints one line with the number of failed samples, their most common error and an example of it."""
        failed = [t for t in trajectories if not t.ok]
        if not failed:
            return
        example, count = commonest_failure(failed)
        same = "" if count == len(failed) else f", {count} of them with"
        prompt = shorten(example.prompt.text, 120, keep_end=True)
        answer = shorten(response_of(example, self.decode), 120) if self.decode else ""
        text = (
            f"{len(failed)} of {len(trajectories)} samples failed{same}: {shorten(headline(example), 240)} | "
            f"prompt {prompt!r}, answer {answer!r}{f' | {path.name}' if path else ''}"
        )
        self.message(text)

    def message(self, text: str) -> None:
        self.progress.message(text)

    def close(self) -> None:
        """Closes all files, gives the run folder to the programs that installed packages attach (entry points
        `openrlhf.attached.folder`), and prints a few samples of the last evaluation, or of the last step if
        there was none."""
        try:
            with self.progress.phase("write rollouts"):
                self.journal.close()
        finally:
            self.trackers.close()
            for text in self.health.at_end():
                self._warn(self.step, text)
            self.progress.close()
        for name, point in registered("attached.folder").items():
            try:
                point.load()(self.folder.path)
            except Exception as error:  # of old files or of the disk; the model is not saved yet
                logger.warning("%s: %s was not made: %r", self.folder.path, name, error)
        if self.decode and self.samples:
            print_samples(self.samples.get("eval") or self.samples["step"], self.decode)

    def _warn(self, step: int, text: str) -> None:
        self.message(f"unhealthy: {text}")
        with open(self.folder.health_path, "a", encoding="utf-8") as file:
            file.write(to_json({"step": step, "text": text}) + "\n")
