import json
import logging
import math
import sys
import threading
import time

import numpy as np
import pytest
import torch

from openrlhf.observability import trackers as trackers_module
from openrlhf.observability.run_folder import RunFolder
from openrlhf.observability.trackers import (
    JsonlTracker,
    TensorBoardTracker,
    Trackers,
    WandbTracker,
    read_metrics,
)

SECRET = "0123456789abcdef0123456789abcdefMARKER00"


class Recorder:
    """A tracker that keeps what it gets, after whatever `before` does."""

    def __init__(self, before=lambda step: None):
        self.before, self.rows, self.closed = before, [], False

    def log(self, step, metrics):
        self.before(step)
        self.rows.append((step, metrics))

    def table(self, step, name, columns, rows):
        self.rows.append((step, name, columns, rows))

    def close(self):
        self.closed = True


def refuse(step):
    raise ConnectionError("no route to the host")


def test_jsonl_is_on_disk_when_log_returns(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(
        3, {"a/b": 1, "α": np.float32(0.5), "t": torch.tensor(2.0), "bad": math.nan, "big": -math.inf}
    )
    row = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
    assert row == {"step": 3, "a/b": 1.0, "α": 0.5, "t": 2.0, "bad": "NaN", "big": "-Infinity"}
    metrics = read_metrics(tmp_path / "m.jsonl")[3]
    assert math.isnan(metrics["bad"]) and metrics["big"] == -math.inf and metrics["a/b"] == 1


@pytest.mark.parametrize(
    ("tail", "steps"), [('{"step": 2, "a', [1, 9]), ('{"step": 2}', [1, 2, 9]), ("", [1, 9])]
)
def test_jsonl_goes_on_after_a_half_written_line(tmp_path, tail, steps):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n' + tail)
    JsonlTracker(path).log(9, {})
    assert list(read_metrics(path)) == steps
    path.write_text('{"st')
    JsonlTracker(path).log(9, {})
    assert list(read_metrics(path)) == [9]


def test_rows_of_one_step_are_merged(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {"a": 1})
    tracker.log(1, {"b": 2})
    assert read_metrics(tmp_path / "m.jsonl") == {1: {"a": 1, "b": 2}}


def test_everyone_gets_everything_in_order(tmp_path):
    first, second = Recorder(), Recorder()
    trackers = Trackers(JsonlTracker(tmp_path / "m.jsonl"), [first, second])
    for step in range(50):
        trackers.log(step, {"a": torch.tensor(1.0)})
    trackers.table(50, "samples", ["x"], [["y"]])
    trackers.close()
    expected = [(step, {"a": 1.0}) for step in range(50)] + [(50, "samples", ["x"], [["y"]])]
    assert first.rows == second.rows == expected and first.closed
    assert len(read_metrics(tmp_path / "m.jsonl")) == 50


def test_a_failing_mirror_is_switched_off_with_one_warning(tmp_path, caplog):
    calls = []
    failing, healthy = Recorder(lambda step: (calls.append(step), refuse(step))), Recorder()
    trackers = Trackers(JsonlTracker(tmp_path / "m.jsonl"), [failing, healthy])
    for step in range(10):
        trackers.log(step, {"a": step})
    trackers.close()
    assert calls == [0, 1, 2]
    assert len(healthy.rows) == len(read_metrics(tmp_path / "m.jsonl")) == 10
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING and "\n" not in text
    assert "Recorder" in text and "ConnectionError: no route to the host" in text


def test_failures_with_successes_between_them_are_forgiven(tmp_path, caplog):
    flaky = Recorder(lambda step: refuse(step) if step % 3 else None)
    trackers = Trackers(JsonlTracker(tmp_path / "m.jsonl"), [flaky])
    for step in range(30):
        trackers.log(step, {})
    trackers.close()
    assert [step for step, _ in flaky.rows] == list(range(0, 30, 3)) and not caplog.records


def test_a_mirror_that_hangs_does_not_delay_training(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers_module, "QUEUE_ROWS", 5)
    released = threading.Event()
    hanging = Recorder(lambda step: released.wait(20))
    trackers = Trackers(JsonlTracker(tmp_path / "m.jsonl"), [hanging])
    started = time.monotonic()
    for step in range(100):
        trackers.log(step, {})
    trackers.close(timeout=0.1)
    assert time.monotonic() - started < 2
    released.set()
    assert len(read_metrics(tmp_path / "m.jsonl")) == 100
    assert "did not finish" in caplog.text and "too slow" in caplog.text


def test_a_failing_record_is_raised(tmp_path):
    trackers = Trackers(JsonlTracker(tmp_path / "m.jsonl"))
    trackers.close()
    with pytest.raises(ValueError, match="closed file"):
        trackers.log(1, {})


def test_tensorboard_files_hold_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path / "tb")
    for step in range(5):
        tracker.log(step, {"rollout/reward_mean": step / 4, "bad": math.nan})
    tracker.table(4, "samples", ["prompt", "reward"], [["a|b\n<script>", 1.0]])
    tracker.close()
    time.sleep(0.01)
    resumed = TensorBoardTracker(tmp_path / "tb", resume_step=2)
    resumed.log(3, {"rollout/reward_mean": 9.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    # What came after the restored step is hidden.
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward_mean")] == [
        (0, 0),
        (1, 0.25),
        (2, 0.5),
        (3, 9),
    ]


def test_tensorboard_tables_are_markdown(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    tracker.table(4, "samples", ["prompt", "reward"], [["a|b\nc", 1.0]])
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("samples/text_summary")
    assert event.tensor_proto.string_val[0].decode().splitlines() == [
        "| prompt | reward |",
        "| --- | --- |",
        "| a\\|b<br>c | 1.0 |",
    ]


@pytest.mark.parametrize(
    ("module", "flag", "make"),
    [
        ("torch.utils.tensorboard", "--logger.tensorboard_dir", lambda path: TensorBoardTracker(path)),
        (
            "wandb",
            "--logger.wandb.key",
            lambda path: WandbTracker(SECRET, folder=RunFolder(path), project="p", run_name="r"),
        ),
    ],
)
def test_a_missing_package_is_named_with_the_remedy(tmp_path, monkeypatch, module, flag, make):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match="pip install") as caught:
        make(tmp_path)
    assert flag in str(caught.value) and SECRET not in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_wandb_offline_never_writes_the_key(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    argv = ["openrlhf", "--logger.wandb.key", SECRET]
    config = f"logger: {{wandb: {{key: {SECRET}}}}}"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", argv)
    folder = RunFolder.create(tmp_path / "run", config_yaml=config, argv=argv, resume=False)
    tracker = WandbTracker(SECRET, folder=folder, project="p", run_name="r")
    tracker.log(1, {"rollout/reward_mean": 0.5, "bad": math.nan})
    tracker.table(1, "samples", ["prompt", "reward"], [["hi", 1.0], ["ho", "env_error"]])
    tracker.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [path for path in files if b"MARKER" in path.read_bytes()] == []
