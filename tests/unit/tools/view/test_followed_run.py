"""The screen of `openrlhf watch`, from the files of a run folder."""

import fcntl
import io
import json
import math
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import records
from refusals import refused
from rich.console import Console

from openrlhf.config.sections import LoggerConfig
from openrlhf.errors import ErrorCode
from openrlhf.observability.journal import Journal
from openrlhf.observability.lock import locked
from openrlhf.observability.observer import Observer
from openrlhf.observability.run_folder import RunFolder
from openrlhf.tools.command_line.runs import find_run
from openrlhf.tools.view import followed_run
from openrlhf.tools.view.flags import watch as watch_command
from openrlhf.tools.view.followed_run import FollowedRun, is_locked
from openrlhf.tools.view.metrics import Tail
from openrlhf.tools.view.run_screen import Sparkline, chosen_metrics, frame, sum_phases

TIMES = {"timing/generate": 6.0, "timing/update": 3.0, "timing/step_total": 10.0}


def append(path: Path, *rows: dict) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def rows(count: int, **more: float) -> list[dict]:
    return [{"step": i, "rollout/reward_mean": i / 10, **TIMES, **more} for i in range(1, count + 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "out" / "runs" / "ppo_1"
    (run / "rollouts").mkdir(parents=True)
    (run / "argv.txt").write_text("openrlhf ppo\n")
    (run / "config.yaml").write_text("actor: {model_name_or_path: org/model}\n")
    RunFolder(run).write_total(30)
    append(run / "metrics.jsonl", *rows(12))
    return run


def follow(folder: Path) -> FollowedRun:
    run = FollowedRun(folder)
    run.refresh()
    return run


def text_of(run: FollowedRun, width: int = 120, height: int | None = None) -> str:
    console = Console(width=width, height=height, file=io.StringIO(), record=True, force_terminal=True)
    console.print(frame(run, width, height), highlight=False)
    return console.export_text()


def test_a_live_run(folder: Path) -> None:
    with locked(folder, flag="--x"):
        run = follow(folder)
        assert run.state == "running"
        assert run.eta == pytest.approx(180, abs=11)
        text = text_of(run)
    assert "running" in text and "step 12 of 30" in text and "org/model" in text and "10s a step" in text


def test_requests_of_the_engines(folder: Path) -> None:
    """They are shown while the run writes them."""
    made = RunFolder(folder)
    with locked(folder, flag="--x"):
        assert "requests" not in text_of(follow(folder))
        made.write_queues([(3, 2), None, (1, 0)])
        text = text_of(follow(folder))
        assert "all 4 running, 2 waiting · 0: 3 running, 2 waiting · 1: starting · 2: 1 running" in text
        made.write_queues([(1, 0)] * 40)
        assert "31: 1 running, 0 waiting · 8 more engines" in " ".join(text_of(follow(folder), 1000).split())
        os.utime(made.queues_path, (time.time() - 600,) * 2)
        assert not follow(folder).queues
        (folder / "engines.json").write_text('{"engines": [{"running": "x"}]}')
        assert not follow(folder).queues
    made.write_queues([(1, 0)])
    assert follow(folder).state == "died" and not follow(folder).queues


def test_a_dead_run_and_one_that_ended(folder: Path) -> None:
    with locked(folder, flag="--x"):
        pass
    assert follow(folder).state == "died" and "killed" in text_of(follow(folder))
    (folder / "report.html").touch()
    assert follow(folder).state == "ended"
    RunFolder(folder).write_total(12)
    assert "finished" in text_of(follow(folder))


def test_a_run_before_its_first_step(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    with locked(folder, flag="--x"):
        assert "no step is finished yet" in text_of(follow(folder))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"total_steps": "x"}'])
def test_a_number_of_steps_that_cannot_be_read(folder: Path, content: str) -> None:
    (folder / "progress.json").write_text(content)
    assert follow(folder).folder.total_steps is None
    assert "step 12 " in text_of(follow(folder))


def test_a_run_records_its_number_of_steps(tmp_path: Path) -> None:
    made = RunFolder.create(tmp_path / "run", config_yaml="", argv=["openrlhf"], resume=False)
    Observer(made, LoggerConfig()).start(7)
    assert FollowedRun(made.path).folder.total_steps == 7


def test_a_folder_without_a_lock(folder: Path) -> None:
    assert follow(folder).state == "unknown"
    text_of(follow(folder))


def test_the_look_at_a_lock_keeps_no_run_out(folder: Path) -> None:
    with locked(folder, flag="--x"):
        assert is_locked(folder)
    assert is_locked(folder) is False
    with locked(folder, flag="--x"):
        pass


def test_only_new_bytes_are_read(folder: Path) -> None:
    tail = Tail(folder / "metrics.jsonl")
    assert tail.read()[1] == rows(12)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 13}\n{"st')
        file.flush()
        assert tail.read() == (False, [{"step": 13}])
        assert tail.read() == (False, [])
        file.write('ep": 14}\n')
    assert tail.read() == (False, [{"step": 14}])


def test_a_run_that_resumes_removes_its_last_steps(folder: Path) -> None:
    run = follow(folder)
    run.folder.rewind(8)
    run.refresh()
    assert list(run.steps) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_seconds_of_a_step_leave_out_the_first(folder: Path) -> None:
    """The last 50 count; a step without a duration does not."""
    run = follow(folder)

    def mean(*seconds: float) -> float | None:
        run.steps.clear()
        run.steps.update({i: {"timing/step_total": s} for i, s in enumerate(seconds, start=1)})
        return run.seconds_per_step

    assert mean() is None and mean(90.0) == 90 and mean(90.0, 4.0) == 4 and mean(90.0, 4.0, 2.0) == 3
    assert mean(90.0, math.nan, 2.0) == 2
    assert mean(90.0, 1000.0, *[2.0] * 50) == 2


def test_the_end_of_a_large_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_run, "TAIL_BYTES", 500)
    assert list(follow(folder).steps)[-1] == 12 and len(follow(folder).steps) < 12


def test_lines_that_are_no_json(folder: Path) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("nonsense\n[1]\n" + json.dumps({"step": 13, "a": "NaN", "b": None}) + "\n")
    run = follow(folder)
    assert run.num_unreadable == 2 and run.last_step == 13
    assert "2 lines" in text_of(run)


def test_warnings(folder: Path) -> None:
    append(folder / "health.jsonl", {"step": 3, "text": "a"}, {"step": 4, "text": "entropy [red]fell[/]"})
    text = text_of(follow(folder))
    assert "step 3  a" in text and "step 4  entropy [red]fell[/]" in text


def test_newest_samples(folder: Path) -> None:
    journal = Journal(folder / "rollouts", decode=lambda ids, after: f"answer {len(ids)}")
    good = records.trajectory(2.0, text="good question", actions=(1, 2, 3))
    journal.write(11, [records.trajectory(None), good, records.trajectory(1.0, text="other question")])
    journal.flush()
    run = follow(folder)
    text = text_of(run)
    assert "step_000011" in text and "good question" in text and "answer 3" in text and "no opinion" in text
    time.sleep(0.02)  # file systems keep times in coarse units
    journal.write(12, [records.trajectory(1.0, text="newer question")])
    journal.write(12, [records.trajectory(1.0, text="filtered question")], name="filtered")
    journal.close()
    run.refresh()
    assert "newer question" in text_of(run)
    assert "good question" not in text_of(run) and "filtered question" not in text_of(run)


def test_damaged_samples(folder: Path) -> None:
    (folder / "rollouts" / "step_000001.parquet").write_bytes(b"PAR1 nonsense")
    assert follow(folder).samples_error
    text_of(follow(folder))


def test_hostile_text_does_nothing(folder: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[2J[bold red]x[/]\u202e\r\n[/nothing]"
    journal = Journal(folder / "rollouts", decode=lambda ids, after: evil * 50)
    journal.write(1, [records.trajectory(1.0, text=evil), records.trajectory(None, error=evil)])
    journal.close()
    append(folder / "health.jsonl", {"step": 1, "text": evil})
    append(folder / "metrics.jsonl", {"step": 99, f"eval/{evil}_pass1": 1.0, f"timing/{evil}": 1.0, **TIMES})
    (folder / "config.yaml").write_text(json.dumps({"actor": {"model_name_or_path": evil}}))
    stream = io.StringIO()
    run = follow(folder)
    Console(width=120, file=stream, color_system=None).print(frame(run, 120), highlight=False)
    written = stream.getvalue()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", written)
    assert "[bold red]x[/]" in written


@pytest.mark.parametrize("width", [20, 40, 80, 109, 110, 200])
@pytest.mark.parametrize("height", [None, 5, 24, 60])
def test_frames_fit(folder: Path, width: int, height: int | None) -> None:
    journal = Journal(folder / "rollouts", decode=lambda ids, after: "long answer " * 100)
    journal.write(1, [records.trajectory(1.0, text="question " * 30) for _ in range(9)])
    journal.close()
    append(folder / "health.jsonl", {"step": 1, "text": "much text " * 50})
    lines = text_of(follow(folder), width, height).splitlines()
    assert max(map(len, lines)) <= width
    if height and height >= 60 and width >= 80:
        assert len(lines) <= height


def test_a_phase_outside_all_phases_is_other() -> None:
    assert sum_phases(TIMES) == {"generate": 6.0, "update": 3.0, "other": 1.0}
    assert sum_phases({"timing/a": 3.0, "timing/generate": 8.0, "timing/step_total": 9.0}) == {
        "generate": 8.0,
        "a": 3.0,
    }


def test_the_timeline(folder: Path) -> None:
    bars = re.findall(r" 12 (g+u+\.+) ", text_of(follow(folder)))
    shares = [bars[0].count(letter) / len(bars[0]) for letter in "gu."]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_curves_of_evaluations_come_first() -> None:
    row = {
        "rollout/reward_mean": 1.0,
        "eval/a_score_mean": 1.0,
        "eval/a_pass1": 1.0,
        "eval/b_score_mean": 1.0,
    }
    names = [name for name, _ in chosen_metrics([row])]
    assert names == ["eval/a_pass1", "eval/b_score_mean", "rollout/reward_mean"]


def test_sparkline() -> None:
    def line(values: list[float], width: int = 8) -> str:
        return Sparkline(values, ascii_only=False).text(width)

    assert line([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert line([float(i) for i in range(800)]) == "▁▂▃▄▅▆▇█"
    assert line([1.0, float("nan"), 1.0, float("inf")]) == "▁ ▁ "
    assert line([]) == ""
    assert Sparkline([0.0, 1.0], ascii_only=True).text(9) == "_#"


def test_the_newest_run_of_an_output_folder(folder: Path, tmp_path: Path) -> None:
    old = folder.parent / "ppo_0"
    old.mkdir()
    append(old / "metrics.jsonl", *rows(1))
    os.utime(old / "metrics.jsonl", (1, 1))
    for path in (folder, folder.parent, folder.parent.parent, tmp_path):
        assert find_run(path) == folder
    with refused(ErrorCode.NOT_FOUND):
        find_run(folder / "rollouts")
    with refused(ErrorCode.NOT_FOUND):
        find_run(tmp_path / "nothing")


def test_one_frame_without_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch_command([str(folder)])
    text = capsys.readouterr().out
    assert "step 12 of 30" in text and "\x1b" not in text
    watch_command([str(folder), "--once", "--width", "60"])
    assert max(map(len, capsys.readouterr().out.splitlines())) == 60


@pytest.mark.processes
@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_a_key_leaves_the_screen_and_the_terminal_as_it_was(folder: Path, key: bytes) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "openrlhf.cli.main", "watch", str(folder)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    screen = bytearray()

    def read() -> None:
        with suppress(OSError):  # the terminal is closed
            while True:
                screen.extend(os.read(controller, 65536))

    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:  # fmt: skip
        os.close(terminal)
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        deadline = time.monotonic() + 120
        try:
            while b"step 12 of 30" not in screen:
                assert time.monotonic() < deadline, screen
                time.sleep(0.05)
            os.write(controller, key)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
        reader.join(timeout=60)
    assert screen.count(b"\x1b[?1049h") == screen.count(b"\x1b[?1049l") == 1
