"""The tracker for MLflow."""

import os
import time
from collections.abc import Sequence
from typing import Any

from openrlhf.api import Metrics, TrackedRun, Tracker


class MLflowTracker(Tracker):
    """Records a run in MLflow, with the project of `logger.wandb` as experiment, and its name.

    MLFLOW_TRACKING_URI names the server; without it the run is in `mlflow.db` of the run folder. A resumed
    run continues its MLflow run."""

    name = "mlflow"
    package = "mlflow"
    remedy = 'pip install "openrlhf[mlflow]"'

    def open(self, run: TrackedRun) -> None:
        super().open(run)
        mlflow, folder, flags = self.library(), run.folder.path.absolute(), run.logger.wandb
        self._metric = mlflow.entities.Metric
        is_local = "MLFLOW_TRACKING_URI" not in os.environ
        self._client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db" if is_local else None)
        place = str(folder / "mlflow") if is_local else None

        def create() -> str:
            known = self._client.get_experiment_by_name(flags.project)
            made = known.experiment_id if known else self._client.create_experiment(flags.project, place)
            run_id = self._client.create_run(made, run_name=flags.run_name).info.run_id
            self._client.log_dict(run_id, run.folder.read_config(), "config.yaml")
            return run_id

        self._id = self.kept_id(create)

    def log(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(name, metrics[name], now, step) for name in metrics])

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        cells = {column: [str(row[i]) for row in rows] for i, column in enumerate(columns)}
        self._client.log_table(self._id, cells, f"{name}/{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)
