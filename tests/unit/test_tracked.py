import io
import itertools

import pytest

from openrlhf.observe.tracked import tracked


class Terminal(io.StringIO):
    def isatty(self):
        return True


def clock(seconds):
    """A clock that moves by this much each time it is read."""
    return map(seconds.__mul__, itertools.count()).__next__


def test_a_quick_loop_shows_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        assert list(tracked("abc", 3, "rows", stream=stream, now=clock(0.5))) == ["a", "b", "c"]
        assert stream.getvalue() == ""


def test_a_file_gets_a_line_every_ten_seconds_with_rate_and_time_left():
    stream = io.StringIO()
    assert sum(tracked(range(100), 100, "rows", stream=stream, now=clock(0.25))) == 4950
    lines = [line.partition(" ")[2] for line in stream.getvalue().splitlines()]
    assert lines == ["rows: 40/100 4/s eta 15s", "rows: 80/100 4/s eta 5.0s"]


def test_an_unknown_total_has_no_time_left():
    stream = io.StringIO()
    assert len(list(tracked(range(50), None, "rows", stream=stream, now=clock(0.25)))) == 50
    assert stream.getvalue().endswith(" rows: 40 4/s\n")


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    items = tracked(range(5), 5, "rows", stream=stream, now=clock(1.0))
    for _ in itertools.islice(items, 4):
        pass
    items.close()
    assert "rows" in stream.getvalue() and "/5" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")  # the line of the bar is erased


def test_only_the_first_process_of_a_machine_speaks(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    stream = io.StringIO()
    assert list(tracked("ab", 2, "rows", stream=stream, now=clock(60))) == ["a", "b"]
    assert stream.getvalue() == ""


def test_an_error_of_the_loop_passes(monkeypatch):
    def fails():
        yield 1
        raise KeyError("row 2")

    with pytest.raises(KeyError, match="row 2"):
        list(tracked(fails(), 2, "rows", stream=io.StringIO(), now=clock(60)))
