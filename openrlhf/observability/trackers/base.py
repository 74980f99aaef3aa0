"""Base class of trackers and the description of the run that they track."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from openrlhf.config.sections import LoggerConfig
from openrlhf.files import write_atomically
from openrlhf.observability.run_folder import RunFolder
from openrlhf.registry import Selectable
from openrlhf.types import Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """Description of the run that a tracker tracks."""

    folder: RunFolder
    """The run's files. A tracker may write its own files to `folder.path`."""
    logger: LoggerConfig
    """The flags `logger.*`. The name of the run is `logger.wandb.run_name`."""
    resume_step: int | None = None
    """The restored step; None for a fresh run."""


class Tracker(Selectable, ABC):
    """Records the metrics of a run. It exists only in the process that logs for all ranks.

    Annotated fields with a default are options, which `--logger.tracker_options NAME=VALUE` sets. A tracker
    neither stops nor delays training. Once it is open, its methods run one at a time in a separate thread.
    After three failures in a row it is switched off with a warning; `metrics.jsonl` is always written."""

    package: ClassVar[str] = ""
    """Package that the tracker imports. A run checks that it is installed before anything starts."""
    remedy: ClassVar[str] = ""
    """Command that installs that package."""

    run: TrackedRun = field(init=False, repr=False)

    def library(self) -> Any:
        """Imports `package`, which may be missing and take seconds."""
        return import_module(self.package)

    def kept_id(self, make: Callable[[], str]) -> str:
        """Returns the id by which the tracker knows the run: that in the file `{name}_id.txt` of the run
        folder, so that a resumed run has the same, or else what `make` returns."""
        file = self.run.folder.path / f"{self.name}_id.txt"
        if not file.exists():
            write_atomically(file, [make()])
        return file.read_text(encoding="utf-8")

    def open(self, run: TrackedRun) -> None:
        """Begins to track a run. Called once, before anything is logged. An exception of a user's tracker
        ends the run."""
        self.run = run

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """Logs the metrics of one step; called once per step, in order."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Logs rows of text and numbers, such as sampled answers. A tracker may ignore them."""

    def close(self) -> None:
        """Writes pending output. Called once, after everything is logged."""
