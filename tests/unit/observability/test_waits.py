import io
import itertools
import json
import logging
import re
import time

import pytest
from terminals import CONTROL, HOSTILE, Clock, Terminal, lines_of, on_a_terminal

from openrlhf.observability import waits
from openrlhf.observability.formats import format_duration
from openrlhf.observability.waits import tracked, waiting


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
    monkeypatch.setattr(waits, "WAIT_PATIENCE", 0.05)
    monkeypatch.setattr(waits, "LINE_EVERY", 0.1)
    waits.warn_once.cache_clear()
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
    monkeypatch.setattr(waits, "DURATIONS_KEPT", 2)
    for name, seconds in (("a", 1.0), ("b", 2.0), ("a", 3.0), ("c", 4.0)):
        waits._remember(name, seconds)
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
    waits._remember("loading", 12.3)

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
