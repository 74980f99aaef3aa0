"""Shows the progress of operations outside a run's steps on stderr: of loops, and of waits without countable
parts."""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from openrlhf.errors import is_first_of_machine, warn_once
from openrlhf.files import cache_folder, write_atomically
from openrlhf.observability.formats import clean_text, format_duration, format_number
from openrlhf.observability.phases import Phase

if TYPE_CHECKING:
    from openrlhf.observability.bars import TerminalBars

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")

LINE_EVERY = 10.0
"""Seconds without output after which a file gets a line."""
LOOP_PATIENCE, WAIT_PATIENCE = 2.0, 1.0
"""Seconds after which the bar of a loop appears, and the first output about a wait."""
CHECK_PATIENCE = 4.0
"""Seconds after which a file gets the first line about checks. Checks often fail earlier, and then only the
error is printed."""
DURATIONS_KEPT = 200
"""Number of waits whose durations are remembered."""


def tracked(
    items: Iterable[ItemT],
    total: int | None,
    title: str,
    *,
    stream: TextIO | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Generator[ItemT, None, None]:
    """Yields the items unchanged and shows progress: a bar that disappears at the end, or a line every 10
    seconds in a file. A loop of less than 2 seconds shows nothing. Only the first process of a machine
    prints. `total`: None if the number of items is unknown."""
    if not is_first_of_machine():
        yield from items
        return
    phase, stream = Phase(name=clean_text(title), total=total, now=now), stream or sys.stderr
    bars = terminal_bars(stream, transient=True) if is_terminal(stream) else None
    due = LOOP_PATIENCE if bars else LINE_EVERY
    try:
        for item in items:
            yield item
            phase.done += 1
            if phase.elapsed < due:
                continue
            phase.figures = _rate(phase)
            if bars:
                bars.show(phase)
            else:
                print_plain(phase.line(), stream)
            due = phase.elapsed + (0.1 if bars else LINE_EVERY)
    finally:
        if bars:
            bars.stop()


@contextmanager
def waiting(
    title: str, *, key: str = "", patience: float | None = None, stream: TextIO | None = None
) -> Iterator[None]:
    """Reports on stderr that the block runs, its elapsed time, and its duration the last time. Only rank 0
    prints.

    Args:
        title: name of the operation, such as `starting 2 rollout engines`.
        key: other things that determine the duration, such as the model. Durations are stored by title and
            key in the cache folder.
        patience: seconds before the first line in a file; None: `WAIT_PATIENCE`, as on a terminal.
        stream: stream to print to; None: stderr.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    name = f"{title} {key}".strip()
    last = _durations().get(name)
    before = "" if last is None else f" (last time {format_duration(last)})"
    phase = Phase(name=clean_text(title) + before, total=None)
    ended = threading.Event()
    arguments = (phase, stream or sys.stderr, ended, patience or WAIT_PATIENCE)
    thread = threading.Thread(target=_report_wait, args=arguments, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # bounded: it prints one line
    if phase.elapsed >= WAIT_PATIENCE:
        _remember(name, phase.elapsed)


def checking() -> AbstractContextManager[None]:
    """Shows a progress line while models and data are validated."""
    return waiting("checking models and data", patience=CHECK_PATIENCE)


def _report_wait(phase: Phase, stream: TextIO, ended: threading.Event, patience: float) -> None:
    on_terminal = is_terminal(stream)
    if ended.wait(WAIT_PATIENCE if on_terminal else patience):
        return
    if on_terminal:
        with terminal_bars(stream, transient=True) as bars:
            bars.show(phase)
            ended.wait()  # bounded: by the wait that it shows
        return
    print_plain(phase.line(), stream)
    while not ended.wait(LINE_EVERY):
        print_plain(phase.line(), stream)


def _durations() -> dict[str, float]:
    """Returns the stored seconds of each wait, the newest last; {} if the file cannot be read."""
    try:
        return json.loads(_durations_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _remember(name: str, seconds: float) -> None:
    known = {other: value for other, value in _durations().items() if other != name}
    newest = list({**known, name: round(seconds, 2)}.items())[-DURATIONS_KEPT:]
    path = _durations_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [json.dumps(dict(newest), indent=0)], shared=True)
    except OSError as error:
        warn_once(logger, f"durations of starts cannot be stored in {path}: {error.strerror or error}")


def _durations_path() -> Path:
    return cache_folder() / "durations.json"


def _rate(phase: Phase) -> dict[str, float | str]:
    figures: dict[str, float | str] = {"rate": f"{format_number(phase.done / phase.elapsed)}/s"}
    if phase.total is not None:
        left = max(0, phase.total - phase.done) * phase.elapsed / phase.done
        figures["eta"] = format_duration(left)
    return figures


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def print_plain(text: str, stream: TextIO) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=stream, flush=True)


def terminal_bars(stream: TextIO, *, transient: bool = False) -> "TerminalBars":
    from openrlhf.observability.bars import TerminalBars  # late: rich takes longer than parsing flags

    return TerminalBars(stream, transient=transient)
