import errno
import json
import logging
import math
import os
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused

from openrlhf.config.sections import LoggerConfig, WandbConfig
from openrlhf.errors import ErrorCode
from openrlhf.observability.observer import Observer
from openrlhf.observability.run_folder import RunFolder
from openrlhf.observability.trackers import background
from openrlhf.observability.trackers.background import Trackers
from openrlhf.observability.trackers.base import TrackedRun
from openrlhf.observability.trackers.load import TRACKERS, build_trackers, open_trackers
from openrlhf.observability.trackers.metrics_file import JsonlTracker, read_metrics
from openrlhf.observability.trackers.tensorboard import TensorBoardTracker
from openrlhf.observability.trackers.wandb import WandbTracker

NAMES = ("wandb", "trackio", "mlflow", "swanlab")
SECRET = "0123456789abcdef0123456789abcdefMARKER00"


class Recorder:
    """Tracker that records its calls; `before` runs ahead of each."""

    def __init__(self, before=lambda step: None):
        self.before, self.rows, self.closed = before, [], False

    def log(self, step, metrics):
        self.before(step)
        self.rows.append((step, metrics))

    def table(self, step, name, columns, rows):
        self.rows.append((step, name, columns, rows))

    def close(self):
        self.closed = True


def opened(cls, folder, logger=None, **options):
    tracker = cls()
    tracker.open(TrackedRun(folder=RunFolder(folder), logger=logger or LoggerConfig(), **options))
    return tracker


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


def test_a_metric_takes_no_steps_number(tmp_path):
    JsonlTracker(tmp_path / "m.jsonl").log(3, {"loss": 1.0, "step": 5.5})
    assert read_metrics(tmp_path / "m.jsonl") == {3: {"loss": 1.0}}


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
    assert "Recorder" in text and "ConnectionError: " in text


def test_failures_with_successes_between_them_are_forgiven(tmp_path, caplog):
    flaky = Recorder(lambda step: refuse(step) if step % 3 else None)
    trackers = Trackers(JsonlTracker(tmp_path / "m.jsonl"), [flaky])
    for step in range(31):
        trackers.log(step, {})
    trackers.close()
    assert [step for step, _ in flaky.rows] == list(range(0, 31, 3)) and not caplog.records


def test_the_last_failures_of_a_run_are_told(tmp_path, caplog):
    """These failures are too few to switch the mirror off, and nothing after them shows that it has
    recovered."""
    flaky = Recorder(lambda step: refuse(step) if step > 7 else None)
    trackers = Trackers(JsonlTracker(tmp_path / "m.jsonl"), [flaky])
    for step in range(10):
        trackers.log(step, {})
    trackers.close()
    (record,) = caplog.records
    text = record.getMessage()
    assert "Recorder" in text and "last 2 rows" in text and "ConnectionError: " in text


def test_a_mirror_that_exits_ends_nothing_but_itself(tmp_path, caplog):
    leaving = Recorder(lambda step: sys.exit(3))
    trackers = Trackers(JsonlTracker(tmp_path / "m.jsonl"), [leaving])
    for step in range(10):
        trackers.log(step, {})
    trackers.close()
    (record,) = caplog.records
    text = record.getMessage()
    assert "Recorder" in text and "3 failures" in text and "SystemExit: 3" in text
    assert leaving.closed


def test_a_mirror_that_hangs_does_not_delay_training(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(background, "QUEUE_ROWS", 5)
    released = threading.Event()
    hanging = Recorder(lambda step: released.wait(20))
    trackers = Trackers(JsonlTracker(tmp_path / "m.jsonl"), [hanging])
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "tracker-Recorder")
    started = time.monotonic()
    for step in range(100):
        trackers.log(step, {})
    trackers.close(timeout=0.1)
    assert time.monotonic() - started < 2
    released.set()
    assert len(read_metrics(tmp_path / "m.jsonl")) == 100
    assert "did not finish" in caplog.text and "too slow" in caplog.text
    assert thread.daemon  # it does not keep the process alive


def test_a_failing_record_is_raised(tmp_path):
    trackers = Trackers(JsonlTracker(tmp_path / "m.jsonl"))
    trackers.close()
    with pytest.raises(ValueError, match="closed file"):
        trackers.log(1, {})


def test_rows_that_a_full_disk_refuses_are_written_later(tmp_path, monkeypatch, caplog):
    free, real = [30], os.write

    def write(file, data):
        if not free[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(file, bytes(data)[: free[0]])
        free[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    for step in range(5):
        tracker.log(step, {"loss": step})
    (record,) = caplog.records
    assert "m.jsonl" in record.getMessage() and os.strerror(errno.ENOSPC) in record.getMessage()
    free[0] = 1000
    tracker.log(5, {"loss": 5})
    tracker.close()
    assert read_metrics(tmp_path / "m.jsonl") == {step: {"loss": step} for step in range(6)}
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 6
    free[0], full = 0, JsonlTracker(tmp_path / "full.jsonl")
    for step in range(2):
        full.log(step, {"loss": step})
    full.close()
    assert caplog.messages[-1].endswith("full.jsonl lacks the last 2 rows")


def test_a_built_in_tracker_that_does_not_open_is_left_out(tmp_path, monkeypatch, caplog):
    def refuse(self, run):
        raise OSError("no route to the host")

    monkeypatch.setattr(TensorBoardTracker, "open", refuse)
    logger = LoggerConfig(tensorboard_dir=str(tmp_path))
    assert open_trackers(SimpleNamespace(logger=logger)) == []
    assert "no route to the host" in caplog.text


def test_tensorboard_files_hold_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = LoggerConfig(tensorboard_dir=str(tmp_path), wandb=WandbConfig(run_name="tb"))
    tracker = opened(TensorBoardTracker, tmp_path, logger)
    for step in range(5):
        tracker.log(step, {"rollout/reward_mean": step / 4, "bad": math.nan})
    tracker.table(4, "samples", ["prompt", "reward"], [["a|b\n<script>", 1.0]])
    tracker.close()
    time.sleep(0.01)
    resumed = opened(TensorBoardTracker, tmp_path, logger, resume_step=2)
    resumed.log(3, {"rollout/reward_mean": 9.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    # Steps after the restored one are hidden.
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward_mean")] == [
        (0, 0),
        (1, 0.25),
        (2, 0.5),
        (3, 9),
    ]
    time.sleep(0.01)
    fresh = opened(TensorBoardTracker, tmp_path, logger)
    fresh.log(1, {"rollout/reward_mean": 7.0})
    fresh.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward_mean")] == [(1, 7)]


def test_tensorboard_tables_are_markdown(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = opened(TensorBoardTracker, tmp_path)  # without logger.tensorboard_dir it is in the run folder
    tracker.table(4, "samples", ["prompt", "reward"], [["a|b\nc", 1.0]])
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("samples/text_summary")
    assert event.tensor_proto.string_val[0].decode().splitlines() == [
        "| prompt | reward |",
        "| --- | --- |",
        "| a\\|b<br>c | 1.0 |",
    ]


@pytest.mark.parametrize(
    ("package", "logger", "flag"),
    [
        ("tensorboard", LoggerConfig(tensorboard_dir="tb"), "--logger.tensorboard_dir"),
        ("tensorboard", LoggerConfig(trackers=("tensorboard",)), "--logger.trackers tensorboard"),
        ("wandb", LoggerConfig(wandb=WandbConfig(key=SECRET)), "--logger.wandb.key"),
        *((n, LoggerConfig(trackers=(n,)), f"--logger.trackers {n}") for n in NAMES),
    ],
)
def test_a_missing_package_is_named_with_the_remedy(monkeypatch, package, logger, flag):
    """The message comes before anything starts."""
    monkeypatch.setitem(sys.modules, package, None)
    name, _, value = flag.partition(" ")
    with refused(ErrorCode.MISSING_PACKAGE, flag=name, value=value) as told:
        build_trackers(logger)
    assert f"package {package}" in told.value.text and "pip install" in told.value.text
    assert SECRET not in str(told.value)


def test_wandb_offline_never_writes_the_key(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    argv = ["openrlhf", "--logger.wandb.key", SECRET]
    config = f"logger: {{wandb: {{key: {SECRET}}}}}"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", argv)
    folder = RunFolder.create(tmp_path / "run", config_yaml=config, argv=argv, resume=False)
    logger = LoggerConfig(wandb=WandbConfig(key=SECRET, project="p", run_name="r"))
    tracker = opened(WandbTracker, folder.path, logger)
    tracker.log(1, {"rollout/reward_mean": 0.5, "bad": math.nan})
    tracker.table(1, "samples", ["prompt", "reward"], [["hi", 1.0], ["ho", "env_error"]])
    tracker.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [path for path in files if b"MARKER" in path.read_bytes()] == []


CSV = """
from openrlhf.observability.trackers.base import Tracker

class CsvTracker(Tracker):
    delimiter: str = ","
    every: int = 1

    def open(self, run):
        self.file = open(run.folder.path / "metrics.csv", "w")

    def log(self, step, metrics):
        if step % self.every == 0:
            print(step, *metrics.values(), sep=self.delimiter, file=self.file)

    def close(self):
        self.file.close()

class Silent(Tracker):
    pass

class Failing(CsvTracker):
    def open(self, run):
        raise OSError("no room")

class Needy(CsvTracker):
    where: str

class Aside:
    pass
"""


@pytest.fixture
def csv_file(tmp_path, monkeypatch):
    """Writes a file with trackers in the folder where the run starts, and installs a package with the
    same."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CSV)
    site = tmp_path / "site"
    info = site / "watch-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "watch_csv.py").write_text(CSV)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: watch\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[openrlhf.trackers]\ncsv = watch_csv:CsvTracker\n")
    monkeypatch.syspath_prepend(site)
    yield tmp_path / "mine.py"
    sys.modules.pop("watch_csv", None)


def observe(folder, logger):
    observer = Observer(RunFolder.create(folder, config_yaml="", argv=["x"], resume=False), logger)
    for step in range(1, 5):
        observer.log_step(step, {"loss": step / 2})
    observer.close()


@pytest.mark.parametrize("name", ["mine.py:CsvTracker", "watch_csv:CsvTracker", "csv"])
def test_a_tracker_of_a_users(csv_file, tmp_path, name):
    """The tracker comes from a file, from a module, and by the name under which a package registers it."""
    logger = LoggerConfig(trackers=(name,), tracker_options=("delimiter=;", "every=2"))
    build_trackers(logger)
    observe(tmp_path / "run", logger)
    rows = [line.split(";")[:2] for line in (tmp_path / "run" / "metrics.csv").read_text().splitlines()]
    assert rows == [["2", "1.0"], ["4", "2.0"]]
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 4


def test_ours_are_named_by_their_files(tmp_path):
    assert set(TRACKERS.ours) == {"tensorboard", "wandb"}
    assert {"trackio", "mlflow", "swanlab"} < {*TRACKERS.names}
    assert (TRACKERS.ours["tensorboard"], TRACKERS.ours["wandb"]) == (TensorBoardTracker, WandbTracker)
    observe(tmp_path, LoggerConfig(trackers=("tensorboard",)))
    assert any((tmp_path / "tensorboard").iterdir())


def test_evaluations_are_logged_whatever_steps_are(tmp_path):
    folder = RunFolder.create(tmp_path, config_yaml="", argv=["x"], resume=False)
    observer = Observer(folder, LoggerConfig(logging_steps=10))
    for step in range(1, 12):
        observer.log_step(step, {"loss": 1.0} | ({"eval/loss": 2.0} if step == 5 else {}))
    with refused(ErrorCode.USER_CODE, flag="--train.hooks", told="the metric mine is None"):
        observer.log_step(12, {"mine": None})
    observer.close()
    assert list(read_metrics(folder.metrics_path)) == [5, 10]


USER, VALUE = ErrorCode.USER_CODE, ErrorCode.INVALID_VALUE
OWN = "CsvTracker, Silent, Failing, Needy, Aside"


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("mine.py:Cvs", USER, OWN),
        ("mein.py:CsvTracker", USER, "mein.py"),
        ("csv_watch:CsvTracker", USER, "'csv_watch'"),
        ("wanbd", VALUE, "use csv, mlflow, "),
        ("mine.py", USER, OWN),
        ("mine.py:Aside", USER, "{file}: line 28: Aside"),
        ("mine.py:Silent", USER, "{file}: line 18: Silent must define log"),
        ("mine.py:Needy", USER, "{file}: line 25: Needy"),
    ],
)
def test_a_name_that_is_no_tracker_is_refused(csv_file, name, code, word):
    with refused(code, flag="--logger.trackers", value=name) as told:
        build_trackers(LoggerConfig(trackers=(name,)))
    assert word.format(file=csv_file) in told.value.text
    assert len(str(told.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("word", "code", "part"),
    [
        ("every=often", ErrorCode.INVALID_VALUE, ""),
        ("every", ErrorCode.INVALID_VALUE, "NAME=VALUE"),
        ("evry=2", ErrorCode.UNKNOWN_FLAG, "delimiter (of CsvTracker), every (of CsvTracker)"),
    ],
)
def test_a_wrong_option_is_refused(csv_file, word, code, part):
    with refused(code, flag="--logger.tracker_options", value=word, told=part):
        build_trackers(LoggerConfig(trackers=("csv",), tracker_options=(word,)))


def test_a_tracker_that_cannot_be_opened_ends_the_run_before_it_trains(csv_file, tmp_path):
    with refused(ErrorCode.USER_CODE, flag="--logger.trackers", value=csv_file) as told:
        observe(tmp_path / "run", LoggerConfig(trackers=("mine.py:Failing",)))
    assert told.value.text == "line 23: OSError: no room"


def test_a_file_that_cannot_be_imported(csv_file):
    csv_file.write_text("x = 1\nraise SystemExit(3)\n")
    with refused(ErrorCode.USER_CODE, flag="--logger.trackers", value="mine.py:Failing") as told:
        build_trackers(LoggerConfig(trackers=("mine.py:Failing",)))
    assert "line 2: SystemExit: 3" in told.value.text
