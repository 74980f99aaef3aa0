"""The watch on a run's processes, with beats and a clock that do what the test says."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from openrlhf.cluster import watchdog
from openrlhf.cluster.watchdog import BEAT, NOTICE, Beat, Board, Watchdog, stacks
from openrlhf.observability.run_folder import RunFolder

LIMITS = {"engines": 60.0, "policy": 1800.0}


class Run:
    """Processes of a run, and the clock. `stopped`: those that beat no more."""

    def __init__(self, tmp_path: Any) -> None:
        self.now = 0.0
        self.beats = {name: Beat(0, 0, False, pid=17, host="node1") for name in ("engine", "rank")}
        self.stopped: set[str] = set()
        self.draining: dict[str, int] = {}
        self.given_up: list[tuple] = []
        self.processes = {"engines": [self.member("engine"), None], "policy": [self.member("rank")]}
        self.watchdog = Watchdog(
            lambda: self.processes,
            LIMITS.__getitem__,
            lambda role, index, member, reason: self.given_up.append((role, index, reason)),
            str(tmp_path),
            cast(Board, self),
        )

    def read_beat(self, name: str) -> Beat | None:
        return self.beats.get(name)

    def read_draining(self) -> dict[str, int]:
        return self.draining

    def ask_for_stacks(self) -> None:
        self.is_asked = True

    def read_stacks(self, name: str) -> str | None:
        return "in forward" if name == "rank" and self.is_asked else None

    def member(self, name: str) -> Any:
        return SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: name))

    def go_on(self, seconds: float) -> None:
        for _ in range(int(seconds / BEAT)):
            self.now += BEAT
            for name, beat in self.beats.items():
                if name not in self.stopped:
                    self.beats[name] = replace(beat, number=beat.number + 1)
            self.watchdog.look()

    def set(self, name: str, **fields: Any) -> None:
        self.beats[name] = replace(self.beats[name], **fields)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Run:
    run = Run(tmp_path)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: run.now))
    return run


def test_processes_that_beat_are_left_alone(run: Run, capsys: pytest.CaptureFixture) -> None:
    run.go_on(3600)
    assert not run.given_up and not capsys.readouterr().err


@pytest.mark.parametrize(("name", "role"), [("engine", "engines"), ("rank", "policy")])
def test_a_process_that_is_stopped(run: Run, capsys: pytest.CaptureFixture, name: str, role: str) -> None:
    """It is reported within 30 s, once, and given up after its limit, once."""
    run.go_on(60)
    run.stopped.add(name)
    run.go_on(30)
    (said,) = capsys.readouterr().err.splitlines()
    assert "(process 17 on node1) has not answered for 20 s; it is given up after" in said
    run.go_on(LIMITS[role] - 30 - BEAT)
    assert not run.given_up
    run.go_on(2 * BEAT)
    ((given_up, index, reason),) = run.given_up
    assert (given_up, index) == (role, 0) and f"has not answered for {LIMITS[role]:.0f} s" in reason


def test_a_process_that_goes_on_in_time(run: Run, capsys: pytest.CaptureFixture) -> None:
    run.go_on(60)
    run.stopped.add("engine")
    run.go_on(40)
    run.stopped.clear()
    run.go_on(3600)
    assert not run.given_up and capsys.readouterr().err.splitlines()[1:] == [
        "engine 0 (process 17 on node1) makes progress again"
    ]


def test_an_engine_without_tokens(run: Run, capsys: pytest.CaptureFixture) -> None:
    run.set("engine", is_busy=True, progress=5)
    run.go_on(LIMITS["engines"] - BEAT)
    assert "has work but made no progress for 20 s" in capsys.readouterr().err and not run.given_up
    run.go_on(2 * BEAT)
    assert run.given_up[0][:2] == ("engines", 0) and len(run.given_up) == 1


@pytest.mark.parametrize("busy", ["engine", "rank"])
def test_while_models_load_the_work_of_any_process_is_progress_of_all(run, capsys, busy):
    """A tenth of a core is enough; processes that wait for the others are left alone."""
    run.watchdog._needs_progress = False
    for name in run.beats:
        run.set(name, is_busy=True)
    for beat in range(int(2 * LIMITS["policy"] / BEAT)):
        run.set(busy, work=0.1 * BEAT * beat)
        run.go_on(BEAT)
    assert not run.given_up and not capsys.readouterr().err
    run.stopped.add("rank")
    run.go_on(LIMITS["policy"] + BEAT)
    assert ("policy", 0) in [given_up[:2] for given_up in run.given_up]


def test_a_process_that_hangs_while_it_loads_a_model(run: Run, capsys: pytest.CaptureFixture) -> None:
    """It answers, and uses as much of a core as Ray's threads do."""
    run.watchdog._needs_progress = False
    run.set("rank", is_busy=True)
    for beat in range(int(LIMITS["policy"] / BEAT) + 1):
        assert not run.given_up
        run.set("rank", work=0.01 * BEAT * beat)
        run.go_on(BEAT)
    (said,) = capsys.readouterr().err.splitlines()
    assert "rank 0 of policy (process 17 on node1) has work but made no progress for 600 s" in said
    run.go_on(BEAT)
    assert run.given_up[0][:2] == ("policy", 0)


def test_work_is_computing_and_reading_also_of_children(tmp_path: Any) -> None:
    before = watchdog._work()
    (tmp_path / "weights").write_bytes(bytes(2**26))
    command = (
        f"open({str(tmp_path / 'weights')!r}, 'rb').read(); import time; print(flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    of_child = watchdog._work() - before
    child.kill()
    child.wait()
    assert 1 <= of_child < 10
    assert watchdog._work() - before < of_child


def test_a_process_that_never_starts(run: Run, capsys: pytest.CaptureFixture) -> None:
    """Its imports may take a while: a third of the limit passes before a line says so."""
    del run.beats["rank"]
    run.go_on(LIMITS["policy"] / 3)
    assert not capsys.readouterr().err
    run.go_on(LIMITS["policy"] * 2 / 3)
    assert "rank 0 of policy has not started for 600 s" in capsys.readouterr().err
    run.go_on(2 * BEAT)
    ((role, _, reason),) = run.given_up
    assert role == "policy" and reason.startswith("rank 0 of policy has not started")


def test_a_long_generation_is_never_given_up(run: Run, capsys: pytest.CaptureFixture) -> None:
    """One token a second for an hour; then the episode waits an hour for its environment."""
    for token in range(3600 // int(BEAT)):
        run.set("engine", is_busy=True, progress=token)
        run.go_on(BEAT)
    run.set("engine", is_busy=False)
    run.go_on(3600)
    assert not run.given_up and not capsys.readouterr().err


def test_queues_of_engines_are_in_the_run_folder(run: Run, tmp_path: Any) -> None:
    """The second engine is replaced, and ranks have no queue. Nothing is written before the run has begun to
    write its folder."""
    run.set("engine", queue=[3, 2])
    run.go_on(BEAT)
    assert not (tmp_path / "engines.json").exists()
    (tmp_path / "argv.txt").touch()
    run.go_on(BEAT)
    assert RunFolder(tmp_path).read_queues() == [(3, 2), None]
    written = (tmp_path / "engines.json").stat()
    os.utime(tmp_path / "engines.json", (0, 0))
    run.go_on(BEAT)
    touched = (tmp_path / "engines.json").stat()
    assert touched.st_ino == written.st_ino and touched.st_mtime > 0
    run.set("engine", queue=[0, 0])
    run.go_on(BEAT)
    assert RunFolder(tmp_path).read_queues() == [(0, 0), None]


def test_a_run_folder_that_cannot_be_written_ends_no_run(run: Run, tmp_path: Any) -> None:
    (tmp_path / "argv.txt").touch()
    (tmp_path / "engines.json").mkdir()
    run.set("engine", queue=[1, 0])
    run.go_on(10 * BEAT)
    assert not run.given_up


def test_a_rank_that_saves_for_a_long_time(run: Run, capsys: pytest.CaptureFixture) -> None:
    run.set("rank", is_busy=True)
    run.go_on(LIMITS["policy"] / 3 - BEAT)
    assert not capsys.readouterr().err
    run.go_on(LIMITS["policy"] / 3)
    assert "rank 0 of policy" in capsys.readouterr().err and not run.given_up


def test_a_new_process_starts_with_a_clean_slate(run: Run) -> None:
    run.stopped.add("engine")
    run.go_on(LIMITS["engines"] - BEAT)
    run.processes["engines"][0] = run.member("another")
    run.go_on(NOTICE)
    assert not run.given_up


def test_stacks_of_all_processes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=iter(range(100)).__next__))
    monkeypatch.setattr(run.watchdog._closed, "wait", lambda seconds: False)
    text = run.watchdog.write_stacks().read_text()
    assert "== engine 0\nit does not answer" in text and "== rank 0 of policy\nin forward" in text
    assert (
        "== the driver\nthread " in text
        and "thread MainThread:\n" in text
        and "test_stacks_of_all_processes" in stacks()
    )


@pytest.mark.parametrize(
    ("end", "said"), [(0, "Ray drains node1: "), (1_800_000_000_000, "Ray drains node1 until ")]
)
def test_a_node_that_ray_drains(run, monkeypatch, capsys, end, said):
    """The run gets SIGTERM once, if it has a process there."""
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(watchdog.os, "kill", lambda *sent: signals.append(sent))
    run.set("rank", node="a1")
    run.draining = {"b2": end}
    run.go_on(60)
    assert not signals and not capsys.readouterr().err
    run.draining["a1"] = end
    run.go_on(60)
    assert signals == [(os.getpid(), signal.SIGTERM)]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said) and line.endswith("the run ends as after SIGTERM")
