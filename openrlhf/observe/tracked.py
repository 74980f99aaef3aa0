"""How far a long loop is, on stderr: a bar on a terminal, otherwise a plain line every 10 seconds."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from openrlhf.observe.progress import clean_text, format_duration, format_number

ItemT = TypeVar("ItemT")

BAR_AFTER = 2.0
LINE_EVERY = 10.0


def tracked(
    items: Iterable[ItemT],
    total: int | None,
    title: str,
    *,
    stream: TextIO | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[ItemT]:
    """The items, unchanged. A loop of less than 2 seconds shows nothing, and the bar leaves no trace. Of the
    processes of a machine the first one speaks. `total` may be unknown."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield from items
        return
    stream = stream or sys.stderr
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    start = now()
    due = start + (BAR_AFTER if is_terminal else LINE_EVERY)
    bar: _Bar | None = None
    try:
        for done, item in enumerate(items, start=1):
            yield item
            if (time_now := now()) < due:
                continue
            note = _rate(done, total, time_now - start)
            if is_terminal:
                bar = bar or _Bar(title, total, stream)
                bar.show(done, note)
                due = time_now + 0.1
            else:
                of_total = "" if total is None else f"/{total:,}"
                print(
                    f"{time.strftime('%H:%M:%S')} {title}: {done:,}{of_total} {note}", file=stream, flush=True
                )
                due = time_now + LINE_EVERY
    finally:
        if bar:
            bar.stop()


def _rate(done: int, total: int | None, seconds: float) -> str:
    rate = f"{format_number(done / seconds)}/s"
    return rate if total is None else f"{rate} eta {format_duration(max(0, total - done) * seconds / done)}"


class _Bar:
    def __init__(self, title: str, total: int | None, stream: TextIO):
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(file=stream, force_terminal=True),
            transient=True,
        )
        self._task = self._progress.add_task(clean_text(title), total=total, note="")
        self._progress.start()

    def show(self, done: int, note: str) -> None:
        self._progress.update(self._task, completed=done, note=note)

    def stop(self) -> None:
        self._progress.stop()
