import io
import math
import os
import pty
import re
import threading
import time
import tty

import pytest

from openrlhf.observe.progress import Progress, StepClock, clean_text, format_duration, format_number

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m[bold]<script>\r\u202e"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_clean_text():
    assert clean_text("a\x1b[2Jb\x00\x07\x7f\x9b1m\r\nc\td\u202e") == "a[2Jb1m\nc\td"
    assert clean_text("日本 é 😀") == "日本 é 😀"
    assert clean_text("\ud800") == "?"
    assert not CONTROL.search(
        clean_text("".join(map(chr, range(0x3000)))).replace("\n", "").replace("\t", "")
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (3.0, "3"), (2048, "2,048"), (0.5, "0.5"), (0.012345, "0.0123"), (1e-6, "1e-06"),
        (-1234.56, "-1,235"), (56_700, "56.7k"), (999_999, "1000k"), (1.23e9, "1.23G"), (1e20, "1.00e+20"),
        (math.nan, "nan"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_format_number(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0124, "12ms"), (0.9999, "1.0s"), (9.94, "9.9s"), (9.96, "10s"), (59.4, "59s"), (59.6, "1m00s"),
        (192, "3m12s"), (3599.9, "1h00m"), (7500, "2h05m"), (273_600, "3d04h"),
    ],
)  # fmt: skip
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


def test_eta():
    clock = StepClock(total=10, now=100.0)
    assert clock.eta() is None
    assert clock.finish(1, now=160.0) == 60
    assert clock.eta() == 9 * 60
    clock.finish(2, now=164.0)
    # The first step is forgotten: 8 steps of 4 seconds.
    assert clock.eta() == 32
    clock.finish(3, now=170.0)
    assert clock.eta() == 7 * 5
    # Steps 4 and 5 in 10 seconds: the mean of 4, 6 and 5.
    clock.finish(5, now=180.0)
    assert clock.eta() == 5 * 5
    clock.finish(10, now=200.0)
    assert clock.eta() is None


def test_eta_after_a_resume_counts_only_own_steps():
    clock = StepClock(total=100, done=90, now=0.0)
    clock.finish(91, now=3.0)
    assert clock.eta() == 9 * 3


def test_eta_follows_the_last_steps():
    clock, now = StepClock(total=1100, now=0.0), 0.0
    for step in range(1, 1001):
        now += 1.0 if step < 900 else 2.0
        clock.finish(step, now=now)
    assert clock.eta() == 200


def test_a_log_file_has_one_line_per_step():
    stream = io.StringIO()
    with Progress(stream=stream) as progress:
        progress.start(1000)
        for step in range(1, 1001):
            with progress.phase("generate", total=256) as phase:
                for _ in range(256):
                    phase.advance(1, tokens_per_second=9012.0)
            with progress.phase("update"):
                pass
            progress.step(step, {"rollout/reward_mean": 0.5123, "policy/ppo_kl": 0.001, "x/other": 3})
    text = stream.getvalue()
    lines = text.splitlines()
    assert len(lines) == 1000 and len(text) < 2_000_000
    assert "\r" not in text and "\x1b" not in text
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d step 7/1000  reward 0\.512  ppo_kl 0\.001"
        r"  generate \d+ms \+ update \d+ms  total \d+ms  eta \S+",
        lines[6],
    )
    assert "eta" not in lines[-1]


def test_evaluations_are_always_shown():
    stream = io.StringIO()
    with Progress(stream=stream) as progress:
        progress.start()
        evaluation = {"eval/gsm8k_pass1": 0.75, "eval/gsm8k_score_mean": 0.75, "eval/math_score_mean": 30.5}
        progress.step(3, evaluation | {"rollout/reward_mean": 0.5, "eval_math_pass1": 0.25})
    assert re.search(
        r" step 3  reward 0\.5  eval/gsm8k_pass1 0\.75  eval/math_score_mean 30\.5  "
        r"eval_math_pass1 0\.25  total \S+$",
        stream.getvalue().strip(),
    )


def test_phases_become_timing_metrics_once():
    with Progress(show=False) as progress:
        progress.start(2)
        with progress.phase("update"):
            for _ in range(2):
                with progress.phase("actor"):
                    time.sleep(0.03)
        timing = progress.step(1, {})
        assert set(timing) == {"timing/update", "timing/actor", "timing/step_total"}
        assert 0.06 <= timing["timing/actor"] <= timing["timing/update"] <= timing["timing/step_total"] < 0.5
        assert set(progress.step(2, {})) == {"timing/step_total"}


def test_a_phase_that_fails_is_counted_and_ended():
    progress = Progress(show=False)
    with pytest.raises(RuntimeError), progress.phase("generate"):
        raise RuntimeError
    assert "timing/generate" in progress.step(1, {})


def test_a_long_phase_speaks_at_its_interval_and_not_more():
    stream = io.StringIO()
    with Progress(stream=stream, plain_seconds=0.1) as progress:
        progress.start(5)
        with progress.phase("generate", total=4000) as phase:
            end = time.monotonic() + 0.65
            while time.monotonic() < end:
                phase.advance(1, note=HOSTILE)
                time.sleep(0.001)
        time.sleep(0.25)
    text = stream.getvalue()
    assert 3 <= len(text.splitlines()) <= 7
    assert re.search(r"  generate \d+/4000 \d+ms note \[2J\]0;title31m\[bold\]<script>$", text, re.MULTILINE)
    assert not CONTROL.search(text.replace("\n", ""))


def test_phases_of_many_threads():
    stream = io.StringIO()
    with Progress(stream=stream) as progress:
        progress.start(1)

        def work(phase):
            for _ in range(500):
                phase.advance()
                with progress.phase("reward"):
                    pass

        with progress.phase("generate", total=4000) as phase:
            threads = [threading.Thread(target=work, args=(phase,)) for _ in range(8)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            assert phase.done == 4000
        assert set(progress.step(1, {})) == {"timing/generate", "timing/reward", "timing/step_total"}


def test_a_rank_that_does_not_show_prints_nothing(capsys):
    with Progress(show=False) as progress:
        progress.start(1)
        progress.message("hello")
        progress.step(1, {"sft/loss": 1.0})
    assert capsys.readouterr() == ("", "")


def test_messages_are_cleaned():
    stream = io.StringIO()
    Progress(stream=stream).message(f"error: {HOSTILE}")
    assert stream.getvalue().endswith(" error: [2J]0;title31m[bold]<script>\n")


def test_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    screen = on_a_terminal(show_a_run)
    for expected in ("step 1/3  loss 0.25", "generate", "128/256", "tokens_per_second 9,012", "eta", "3/3"):
        assert expected in screen
    assert "[2J]0;title31m[bold]<script>" in screen
    assert "\x1b[2J" not in screen and "\x1b]0" not in screen and "\x9b" not in screen
    # The cursor is visible again.
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    screen = on_a_terminal(lambda stream, _: show_a_run(stream))
    assert "step 1/3  loss 0.25" in screen and "\x1b" not in screen


def test_a_crash_gives_the_terminal_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    def crash(stream, _):
        with pytest.raises(RuntimeError), Progress(stream=stream) as progress:
            progress.start(3)
            raise RuntimeError

    screen = on_a_terminal(crash)
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")


def test_output_to_a_pipe_is_plain_whatever_the_environment_wants(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        show_a_run(stream)
    with os.fdopen(read) as stream:
        text = stream.read()
    assert not CONTROL.search(text.replace("\n", "")) and len(text.splitlines()) == 6


def show_a_run(stream, seen=lambda: "128/256"):
    """Three steps. The first waits until the screen that `seen()` returns has been refreshed."""
    with Progress(stream=stream) as progress:
        progress.start(3)
        for step in range(1, 4):
            with progress.phase("generate", total=256) as phase:
                phase.advance(128, tokens_per_second=9012.0, note=HOSTILE)
                deadline = time.monotonic() + 10
                while "128/256" not in seen() and time.monotonic() < deadline:
                    time.sleep(0.02)
            progress.message(HOSTILE)
            progress.step(step, {"policy/loss": 0.25})


def on_a_terminal(show) -> str:
    """What `show(stream, seen)` writes when the stream is a terminal; `seen()` is what it wrote so far."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    chunks = []

    def read():
        while True:
            try:
                chunks.append(os.read(master, 65536))
            except OSError:  # The other end is closed.
                return

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        show(stream, lambda: b"".join(chunks).decode(errors="replace"))
    reader.join(5)
    os.close(master)
    return b"".join(chunks).decode()
