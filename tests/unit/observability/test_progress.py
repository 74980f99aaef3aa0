import io
import os
import re
import threading
import time

import pytest
from terminals import CONTROL, HOSTILE, Clock, lines_of, on_a_terminal

from openrlhf.observability.progress import Progress, StepClock


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


def test_a_log_file_has_one_line_per_slow_step():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, now=clock) as progress:
        progress.start(1000)
        for step, _ in enumerate(clock.passing(1000, 5.0), start=1):
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
        r"  generate \d+ms \+ update \d+ms  total 5\.0s  eta 1h22m",
        lines[6],
    )
    assert "eta" not in lines[-1]


def test_quick_steps_share_a_line_of_their_means():
    """With a step a second there is a line for the first, one for every 5 steps, and one for those left at
    the end."""
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, now=clock) as progress:
        progress.start(13)
        for step, _ in enumerate(clock.passing(13, 1.0), start=1):
            metrics = {"sft/loss": float(step)} | ({"grad_norm": 10.0 * step} if step % 2 else {})
            assert progress.step(step, metrics)["timing/step_total"] == 1.0
    assert lines_of(stream) == [
        "step 1/13  loss 1  grad_norm 10  total 1.0s  eta 12s",
        "step 6/13 (5 steps)  loss 4  grad_norm 40  total 1.0s  eta 7.0s",  # the means of 3 and 5
        "step 11/13 (5 steps)  loss 9  grad_norm 90  total 1.0s  eta 2.0s",  # the means of 7, 9 and 11
        "step 13/13 (2 steps)  loss 12.5  grad_norm 130  total 1.0s",
    ]


def test_labels_that_need_a_word_get_it_once():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, now=clock) as progress:
        progress.start(4)
        for i in clock.passing(4, 10):
            late = {"mismatch/abs_diff_mean": 1e-4} if i else {}
            progress.step(i + 1, {"policy/loss": 1.0, "reward/zero_std_fraction": 0.5} | late)
    first, second, *rest = [i for i, line in enumerate(lines_of(stream)) if line.startswith(" ")]
    assert lines_of(stream)[first].startswith("  uniform: ") and "uniform" in lines_of(stream)[first - 1]
    assert lines_of(stream)[second].startswith("  gap: ") and "gap" in lines_of(stream)[second - 1]
    assert not rest


def test_seconds_of_a_phase_are_those_of_a_step():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, now=clock) as progress:
        progress.start(9)
        for step, _ in enumerate(clock.passing(9, 0.125), start=1):
            with progress.phase("update"):
                clock.time += 0.125
            if step in (3, 5):
                with progress.phase("save"):
                    clock.time += 1.0
            progress.step(step, {})
    assert lines_of(stream)[1] == "step 9/9 (8 steps)  update 125ms + save 250ms  total 500ms"


def test_an_evaluation_and_a_message_do_not_wait():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, now=clock) as progress:
        progress.start(100)
        for step, _ in enumerate(clock.passing(8, 0.1), start=1):
            progress.step(step, {"sft/loss": float(step)} | ({"eval/sft/loss": 0.5} if step == 4 else {}))
            if step == 6:
                progress.message("unhealthy")
    assert [re.sub("  total.*", "", line) for line in lines_of(stream)] == [
        "step 1/100  loss 1",
        "step 4/100 (3 steps)  loss 3  eval/sft/loss 0.5",
        "step 6/100 (2 steps)  loss 5.5",
        "unhealthy",
        "step 8/100 (2 steps)  loss 7.5",  # the run ends early
    ]


def test_messages_of_other_threads_lose_no_step():
    stream, ended = io.StringIO(), threading.Event()
    with Progress(stream=stream) as progress:
        progress.start(3000)

        def talk():
            while not ended.is_set():
                progress.message("written")

        threads = [threading.Thread(target=talk) for _ in range(3)]
        [t.start() for t in threads]
        for step in range(1, 3001):
            progress.step(step, {"sft/loss": 1.0, f"x/{step % 50}": 2.0})
        ended.set()
        [t.join() for t in threads]
    told = re.findall(r"step \d+/3000(?: \((\d+) steps\))?  loss 1  ", stream.getvalue())
    assert sum(int(steps or 1) for steps in told) == 3000


def test_a_silent_step_says_that_it_is_under_way():
    stream = io.StringIO()
    with Progress(stream=stream, plain_seconds=0.1) as progress:
        progress.start(2, done=1)
        time.sleep(0.15)
        progress.step(2, {})
        time.sleep(0.15)
    begun, finished = lines_of(stream)  # nothing follows the last step
    assert re.fullmatch(r"  step 2 1\d\dms", begun) and finished.startswith("step 2/2  total")


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
    assert 3 <= text.count("generate") <= 7
    assert re.search(r"  generate \d+/4,000 \d+ms note \[2J\]0;title31m\[bold\]<script>$", text, re.MULTILINE)
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
    assert "[it] " in screen
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
    """Shows three steps. The first waits until the screen that `seen()` returns has been refreshed."""
    with Progress(stream=stream) as progress:
        progress.start(3)
        for step in range(1, 4):
            with progress.phase("generate", total=256) as phase:
                phase.advance(128, tokens_per_second=9012.0, note=f"[it] {HOSTILE}")
                deadline = time.monotonic() + 10
                while "128/256" not in seen() and time.monotonic() < deadline:
                    time.sleep(0.02)
            progress.message(HOSTILE)
            progress.step(step, {"policy/loss": 0.25})
