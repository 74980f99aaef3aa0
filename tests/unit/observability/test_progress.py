import io
import itertools
import json
import logging
import math
import os
import pty
import re
import threading
import time
import tty

import pytest

from openrlhf.observability import progress as progress_module
from openrlhf.observability.progress import (
    Progress,
    StepClock,
    clean_text,
    format_duration,
    format_number,
    tracked,
    waiting,
)

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m[bold]<script>\r\u202e"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Clock:
    """Clock that stands still until it is told to move."""

    def __init__(self):
        self.time = 1000.0

    def __call__(self):
        return self.time

    def passing(self, count, seconds):
        """Yields 0, 1, ..., with this many seconds before each."""
        for i in range(count):
            self.time += seconds
            yield i


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines_of(stream):
    """Returns the lines without the time of day."""
    return [line.partition(" ")[2] for line in stream.getvalue().splitlines()]


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
        (999.7, "1,000"), (math.nan, "nan"), (-math.inf, "-inf"),
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


def on_a_terminal(show) -> str:
    """Returns the output of `show(stream, seen)` when the stream is a terminal; `seen()` is what it wrote so
    far."""
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


def test_a_quick_loop_shows_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        clock = Clock()
        assert list(tracked(clock.passing(3, 0.5), 3, "rows", stream=stream, now=clock)) == [0, 1, 2]
        assert stream.getvalue() == ""


def test_a_loop_says_in_a_file_every_ten_seconds_how_far_it_is():
    stream, clock = io.StringIO(), Clock()
    assert sum(tracked(clock.passing(100, 0.25), 100, "rows", stream=stream, now=clock)) == 4950
    assert lines_of(stream) == ["rows 40/100 10s rate 4/s eta 15s", "rows 80/100 20s rate 4/s eta 5.0s"]


def test_a_loop_of_unknown_length_has_no_time_left():
    stream, clock = io.StringIO(), Clock()
    assert len(list(tracked(clock.passing(5000, 0.0025), None, "rows", stream=stream, now=clock))) == 5000
    assert lines_of(stream) == ["rows 4,000 10s rate 400/s"]


def test_a_loop_on_a_terminal_has_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = Terminal(), Clock()
    items = tracked(clock.passing(5, 1.0), 5, "rows", stream=stream, now=clock)
    for _ in itertools.islice(items, 4):
        pass
    items.close()
    assert "rows" in stream.getvalue() and "/5" in stream.getvalue() and "eta" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")  # the line of the bar is erased


def test_of_a_machine_only_the_first_process_speaks_of_a_loop(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    stream, clock = io.StringIO(), Clock()
    assert list(tracked(clock.passing(2, 60.0), 2, "rows", stream=stream, now=clock)) == [0, 1]
    assert stream.getvalue() == ""


def test_an_error_of_a_loop_passes():
    def fails():
        yield 1
        raise KeyError("row 2")

    with pytest.raises(KeyError, match="row 2"):
        list(tracked(fails(), 2, "rows", stream=io.StringIO()))


@pytest.fixture
def durations(tmp_path, monkeypatch):
    """Returns the file with durations. Waits speak after 0.05 seconds and then every 0.1."""
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(progress_module, "WAIT_PATIENCE", 0.05)
    monkeypatch.setattr(progress_module, "LINE_EVERY", 0.1)
    progress_module.warn_once.cache_clear()
    return tmp_path / "cache" / "durations.json"


def test_a_wait_says_that_it_lasts_and_the_next_time_how_long_it_took(durations):
    first, second, other = io.StringIO(), io.StringIO(), io.StringIO()
    with waiting(f"loading {HOSTILE}", key="tiny", stream=first):
        time.sleep(0.2)
    lines = lines_of(first)
    assert len(lines) >= 2 and all(re.fullmatch(r"loading \[2J.* \d+ms", line) for line in lines)
    (seconds,) = json.loads(durations.read_text()).values()
    assert 0.2 <= seconds < 2
    with waiting(f"loading {HOSTILE}", key="tiny", stream=second):
        time.sleep(0.1)
    before = re.escape(f"(last time {format_duration(seconds)})")
    assert re.fullmatch(rf"loading \[2J.* {before} \d+ms", lines_of(second)[0])
    with waiting(f"loading {HOSTILE}", key="large", stream=other):
        time.sleep(0.1)
    assert "last time" not in other.getvalue() and not CONTROL.search(other.getvalue().replace("\n", ""))


def test_a_short_wait_is_silent_and_one_that_fails_is_not_remembered(durations):
    stream = io.StringIO()
    with waiting("reading", stream=stream):
        pass
    with pytest.raises(KeyError), waiting("loading", stream=stream):
        time.sleep(0.1)
        raise KeyError
    assert len(lines_of(stream)) == 1 and not durations.exists()


def test_the_newest_waits_are_remembered(durations, monkeypatch):
    monkeypatch.setattr(progress_module, "DURATIONS_KEPT", 2)
    for name, seconds in (("a", 1.0), ("b", 2.0), ("a", 3.0), ("c", 4.0)):
        progress_module._remember(name, seconds)
    assert json.loads(durations.read_text()) == {"a": 3.0, "c": 4.0}


def test_a_wait_without_a_cache_folder_says_so_once(durations, caplog):
    durations.parent.write_text("a file")
    for _ in range(2):
        with waiting("loading", stream=io.StringIO()):
            time.sleep(0.06)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(durations) in record.getMessage()


def test_damaged_durations_are_none(durations):
    durations.parent.mkdir()
    durations.write_text("{half")
    stream = io.StringIO()
    with waiting("loading", stream=stream):
        time.sleep(0.1)
    assert "last time" not in stream.getvalue() and list(json.loads(durations.read_text())) == ["loading"]


def test_a_wait_on_a_terminal_has_a_line_that_goes_away(durations, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    progress_module._remember("loading", 12.3)

    def wait(stream, seen):
        with waiting("loading", stream=stream):
            deadline = time.monotonic() + 10
            while "last time 12s" not in seen() and time.monotonic() < deadline:
                time.sleep(0.02)

    screen = on_a_terminal(wait)
    assert "loading" in screen and "last time 12s" in screen
    assert screen.endswith("\x1b[2K") and screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")


def test_of_all_ranks_only_the_first_speaks_of_a_wait(durations, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    stream = io.StringIO()
    with waiting("loading", stream=stream):
        time.sleep(0.1)
    assert stream.getvalue() == "" and not durations.exists()
