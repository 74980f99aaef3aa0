"""The single interface to a run's output: the screen, the files of the run folder, and trackers."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from openrlhf.config.parse import to_yaml
from openrlhf.config.sections import LoggerConfig, TrainingConfig, is_due
from openrlhf.errors import ErrorCode, RunError, print_all_characters
from openrlhf.observability.hooks.base import Evaluation, Hook, Step, announce
from openrlhf.observability.hooks.load import attached
from openrlhf.observability.phases import Phase
from openrlhf.observability.progress import Progress, is_evaluation
from openrlhf.observability.run_folder import RunFolder
from openrlhf.observability.startup import StartClock
from openrlhf.observability.trackers.background import Trackers
from openrlhf.observability.trackers.base import TrackedRun
from openrlhf.observability.trackers.load import open_trackers
from openrlhf.observability.trackers.metrics_file import JsonlTracker
from openrlhf.plugins import registered
from openrlhf.types import Metrics

logger = logging.getLogger(__name__)


class Observer(Hook):
    """Reports a run: metrics itself, and the rest by its `guests`, the hooks that packages attach to it. It
    exists only in the process that logs for all ranks."""

    def __init__(
        self,
        folder: RunFolder,
        logger: LoggerConfig,
        *,
        resume_step: int | None = None,
        decode: Callable[..., str] | None = None,
        dtype: str = "",
        missing_template: str = "",
    ) -> None:
        """`resume_step`: the restored step; None for a fresh run. `decode`: a `text.Decode` for responses.
        `dtype`: that of the weights which sampler and trainer share; empty in supervised learning.
        `missing_template`: evidence that prompts lack a template."""
        print_all_characters()
        self.folder, self.logger, self.decode = folder, logger, decode
        self.dtype, self.missing_template = dtype, missing_template
        if resume_step is not None:
            folder.rewind(resume_step)
        self.progress = Progress()
        self.step = resume_step or 0
        run = TrackedRun(folder=folder, logger=logger, resume_step=resume_step)
        self.trackers = Trackers(JsonlTracker(folder.metrics_path), open_trackers(run))
        self.guests = attached("observer", observer=self)
        self._of_start: Metrics = {}
        """Metrics of the run's start, until they are logged with the first row of metrics."""

    @classmethod
    def opened(
        cls,
        config: TrainingConfig,
        program: Sequence[str],
        *,
        resume_step: int | None,
        forks: bool = False,
        fork: Mapping[str, Any] | None = None,
        **about: Any,
    ) -> Self:
        """Opens the run folder of a configuration. `program`: words after `python` that started the run.
        `forks`: the run begins as a fork, in a folder of its own; `fork`: the record of that."""
        folder = RunFolder.create(
            config.run_dir,
            config_yaml=to_yaml(config),
            argv=["python", *program],
            resume=resume_step is not None and not forks,
        )
        folder.write_fork(fork or {})
        return cls(folder, config.logger, resume_step=resume_step, **about)

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
        """Reports a step: prints its line, and logs its metrics. Call it once a step."""
        self.step = step
        metrics = {name: _number(name, value) for name, value in metrics.items()}
        metrics |= self.progress.step(step, metrics)
        announce(self.guests, Hook.logged, step, metrics)
        if is_due(step, self.logger.logging_steps) or any(map(is_evaluation, metrics)):
            self.trackers.log(step, metrics | self._of_start)
            self._of_start = {}

    def trained(self, step: Step) -> None:
        announce(self.guests, Hook.trained, step)

    def evaluated(self, evaluation: Evaluation) -> None:
        announce(self.guests, Hook.evaluated, evaluation)

    def saving(self, tag: str) -> None:
        announce(self.guests, Hook.saving, tag)

    def ended(self, step: Step) -> None:
        self.log_step(step.number, step.metrics)

    def message(self, text: str) -> None:
        self.progress.message(text)

    def close(self) -> None:
        """Closes all files, whatever fails, and gives the run folder to the programs that installed packages
        attach (entry points `openrlhf.attached.folder`)."""
        with ExitStack() as last_first:
            last_first.callback(self.progress.close)
            last_first.callback(self.trackers.close)
            for guest in self.guests:
                last_first.callback(announce, [guest], Hook.closing)
        for name, point in registered("attached.folder").items():
            try:
                point.load()(self.folder.path)
            except Exception as error:  # of old files or of the disk; the model is not saved yet
                logger.warning("%s: %s was not made: %r", self.folder.path, name, error)
        announce(self.guests, Hook.closed)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"the metric {name} is {value!r:.100}, not a number; hooks add numbers alone"
        raise RunError(ErrorCode.USER_CODE, text, flag="--train.hooks") from error
