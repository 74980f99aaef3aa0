"""The tracker for trackio."""

from collections.abc import Sequence
from typing import Any

from openrlhf.api import Metrics, TrackedRun, Tracker


class TrackioTracker(Tracker):
    """Records a run in trackio's local database, with the project, group and name of `logger.wandb`.

    The database is in TRACKIO_DIR; `trackio show` displays it. A resumed run continues its trackio run."""

    name = "trackio"
    package = "trackio"
    remedy = 'pip install "openrlhf[trackio]"'

    def open(self, run: TrackedRun) -> None:
        super().open(run)
        trackio, flags = self.library(), run.logger.wandb
        self._table = trackio.Table
        self._run = trackio.init(
            project=flags.project,
            name=flags.run_name,
            group=flags.group,
            config=run.folder.read_config(),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({name: self._table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def close(self) -> None:
        self._run.finish()
