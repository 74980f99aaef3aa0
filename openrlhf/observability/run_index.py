"""The files in a run's folder, for all who read them: report, screen, viewer, doctor, replay, notebooks."""

from functools import cached_property
from pathlib import Path
from typing import Any

from openrlhf.config.fields import flat
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.files import read_object
from openrlhf.observability.journal import journal_steps
from openrlhf.observability.run_folder import RunFolder, read_steps
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.types import Metrics


class RunIndex(RunFolder):
    """The records of a run. Nothing is written to its folder."""

    @cached_property
    def flags(self) -> dict[str, Any]:
        """Values of all flags by key; {} without config.yaml."""
        return flat(self.read_config())

    @property
    def model(self) -> str:
        """The trained model that the flags name; empty if they name none."""
        flags = self.flags
        return str(flags.get("actor.model_name_or_path") or flags.get("model.model_name_or_path") or "")

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the whole run; None if it is not recorded."""
        try:
            total = read_object(self.path / "progress.json")["total_steps"]
        except (ValueError, KeyError):
            return None
        return total if isinstance(total, int) and total > 0 else None

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl as they were written; none without the file."""
        return [*read_steps(self.metrics_path)]

    def metrics(self) -> dict[int, Metrics]:
        """Returns step -> metrics. Raises UsageError if the folder has no metrics.jsonl."""
        if not self.metrics_path.exists():
            text = f"has no metrics.jsonl; {self.runs_inside('metrics.jsonl')}"
            raise UsageError(ErrorCode.NOT_FOUND, text, value=self.path)
        return read_metrics(self.metrics_path)

    @cached_property
    def warnings(self) -> list[dict[str, Any]]:
        """The rows of health.jsonl; none without the file."""
        return [*read_steps(self.health_path)]

    def rollouts(self, name: str = "step") -> dict[int, Path]:
        """Returns step -> file of rollouts, in the order of steps. `name`: step, filtered or eval."""
        return journal_steps(self.rollouts_path, name)

    def runs_inside(self, file: str) -> str:
        """Returns the remedy for a folder that lacks `file` and so is no run: the runs inside it, if any."""
        runs = sorted(str(found.parent) for found in self.path.glob(f"**/{file}"))[:10]
        return f"there are {', '.join(runs)}" if runs else "give the folder of a run (--logger.run_dir)"
