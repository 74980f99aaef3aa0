"""Trackers of other libraries, run offline; their files hold the numbers. Each needs its package."""

import json
import logging
import math
import sqlite3
from pathlib import Path

import pytest

from openrlhf.config.sections import LoggerConfig, WandbConfig
from openrlhf.observability.run_folder import RunFolder
from openrlhf.observability.trackers.base import TrackedRun
from openrlhf.observability.trackers.load import TRACKERS, open_trackers

ROWS = {1: {"rollout/reward_mean": 0.25, "bad": math.nan}, 2: {"rollout/reward_mean": 0.5}}


def track(folder: Path, name: str) -> None:
    """Tracks a run of two steps, the second of which follows a resume."""
    logger = LoggerConfig(trackers=(name,), wandb=WandbConfig(project="p", run_name="r"))
    for step, metrics in ROWS.items():
        run = RunFolder.create(folder, config_yaml="train: {seed: 7}", argv=["x"], resume=step > 1)
        (tracker,) = open_trackers(TrackedRun(folder=run, logger=logger, resume_step=step - 1 or None))
        tracker.log(step, metrics)
        tracker.table(step, "samples", ["prompt", "reward"], [["hi", 1.0], ["ho", "env_error"]])
        tracker.close()


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("trackio.utils")
    monkeypatch.setattr(utils, "TRACKIO_DIR", tmp_path / "own")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "own")
    track(tmp_path / "run", "trackio")
    with sqlite3.connect(tmp_path / "own" / "p.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {"r"}
    numbers = [(step, json.loads(text)) for _, step, text in rows if b"samples" not in text]
    assert numbers == [(1, {"rollout/reward_mean": 0.25, "bad": "NaN"}), (2, {"rollout/reward_mean": 0.5})]
    assert sum(b"env_error" in text for _, _, text in rows) == 2


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    history = client.get_metric_history(run.info.run_id, "rollout/reward_mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]
    assert (run.info.run_name, run.info.status) == ("r", "FINISHED")
    table = json.loads(next((tmp_path / "run").rglob("samples/2.json")).read_text())
    assert table == {"columns": ["prompt", "reward"], "data": [["hi", "1.0"], ["ho", "env_error"]]}
    assert "seed" in next((tmp_path / "run" / "mlflow").rglob("config.yaml")).read_text()


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_swanlab(tmp_path, monkeypatch, caplog, mode):
    """Without a key an online run is recorded offline."""
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", mode)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        track(tmp_path / "run", "swanlab")
    assert ("recording offline" in caplog.text) == (mode == "online")
    recorded = b"".join(file.read_bytes() for file in sorted((tmp_path / "run").rglob("*.swanlab")))
    assert recorded.count(b"rollout/reward_mean") >= 2
    kept = [file.read_text() for file in (tmp_path / "run").rglob("swanlab-metadata.json")]
    assert kept and not any('"command"' in text for text in kept)


def test_each_has_a_class_in_its_file() -> None:
    for name in ("trackio", "mlflow", "swanlab"):
        assert TRACKERS[name].__module__ == f"openrlhf.tools.trackers.{name}" and TRACKERS[name].name == name
