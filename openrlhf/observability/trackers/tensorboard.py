"""The tracker for TensorBoard."""

from collections.abc import Sequence
from typing import Any

from openrlhf.observability.trackers.base import TrackedRun, Tracker
from openrlhf.types import Metrics


class TensorBoardTracker(Tracker):
    """Writes event files to `{logger.tensorboard_dir}/{run_name}`, or `tensorboard` in the run folder.

    TensorBoard hides what an earlier run wrote there; after a resume, values of later steps alone.
    """

    name = "tensorboard"
    package = "tensorboard"
    remedy = "pip install tensorboard"

    def open(self, run: TrackedRun) -> None:
        super().open(run)
        from torch.utils.tensorboard import SummaryWriter  # may be missing, and takes a second

        parent = run.logger.tensorboard_dir
        directory = f"{parent}/{run.logger.wandb.run_name}" if parent else run.folder.path / "tensorboard"
        purge_step = 0 if run.resume_step is None else run.resume_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=10)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        lines = [_markdown_row(columns), _markdown_row(["---"] * len(columns)), *map(_markdown_row, rows)]
        self._writer.add_text(name, "\n".join(lines), step)

    def close(self) -> None:
        self._writer.close()


def _markdown_row(cells: Sequence[Any]) -> str:
    texts = (str(cell).replace("\\", "\\\\").replace("|", "\\|") for cell in cells)
    return "| " + " | ".join("<br>".join(text.splitlines()) for text in texts) + " |"
