"""The seconds of a run's start: the line that a run prints, and its metrics."""

import json
from itertools import count

from openrlhf.config.sections import LoggerConfig
from openrlhf.observability.observer import Observer
from openrlhf.observability.run_folder import RunFolder
from openrlhf.observability.startup import StartClock, process_clock


def test_line_names_the_stages_in_order_and_the_whole_start():
    clock = StartClock(age=2.0, now=count(0, 3).__next__)  # each look at the clock is 3 s after the last one
    with clock.stage("Ray"):
        pass
    clock.add("engines", 8.0)
    clock.add("engines", 0.4)
    assert clock.line() == "started in 11 s (Ray 3, engines 8)"
    assert clock.metrics() == {"start/ray": 3.0, "start/engines": 8.4, "start/total": 14.0}


def test_a_stage_that_fails_is_measured():
    clock = StartClock(now=count().__next__)
    try:
        with clock.stage("data"):
            raise ValueError
    except ValueError:
        assert clock.stages == {"data": 1}


def test_clock_of_a_process_counts_its_imports():
    assert process_clock().total > StartClock().total


def test_first_row_of_metrics_has_the_start(tmp_path, capsys):
    folder = RunFolder.create(tmp_path, config_yaml="{}", argv=["test"], resume=False)
    observer = Observer(folder, LoggerConfig())
    observer.start(2)
    clock = StartClock()
    clock.add("model", 1.0)
    observer.started(clock)
    for step in (1, 2):
        observer.log_step(step, {"sft/loss": 1.0})
    observer.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["start/model"] == 1.0 and first["start/total"] < 60
    assert not any(name.startswith("start/") for name in second)
    assert "started in 0 s (model 1)" in capsys.readouterr().out
