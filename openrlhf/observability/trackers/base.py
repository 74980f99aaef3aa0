"""What a tracker is, and what it is told about its run."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from openrlhf.config.sections import LoggerConfig
from openrlhf.observability.run_folder import RunFolder
from openrlhf.registry import Selectable
from openrlhf.types import Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """A run, as its trackers see it."""

    folder: RunFolder
    """Its files; `folder.path` is where a tracker may write its own."""
    logger: LoggerConfig
    """The flags `logger.*`; `logger.wandb.run_name` names the run."""
    resume_step: int | None = None
    """The step that was restored; None for a fresh run."""


class Tracker(Selectable, ABC):
    """Shows a team the metrics of a run, in the process that speaks for the run.

    Annotated fields with a default are options, which `--logger.tracker_options NAME=VALUE` sets.
    `metrics.jsonl` is always written, so a tracker neither stops nor delays training: once it is open its
    methods run one at a time in a thread of its own, and after three failures in a row, with a warning, no
    more.
    """

    package: ClassVar[str] = ""
    """The package that it imports when it is made; looked for before anything starts."""
    remedy: ClassVar[str] = ""
    """How to install that package."""

    run: TrackedRun = field(init=False, repr=False)

    def open(self, run: TrackedRun) -> None:
        """Begins to track a run: once, before anything is logged. What it raises ends the run."""
        self.run = run

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """Takes the numbers of one step, once for each step, in order."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Takes rows of text and numbers, such as sampled answers. A tracker may leave them out."""

    def close(self) -> None:
        """Writes out what is pending. Nothing is logged after it."""
