"""Shows a run on one screen (`openrlhf watch`)."""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from openrlhf.tools.command_line.runs import find_run
from openrlhf.tools.view.followed_run import FollowedRun
from openrlhf.tools.view.run_screen import frame

REFRESH = 0.5
"""Seconds between two frames."""


def run(path: Path, once: bool, width: int | None) -> None:
    shown = FollowedRun(find_run(path))
    if once or not sys.stdout.isatty():
        show_once(shown, width)
    else:
        show_live(shown)


def show_once(run: FollowedRun, width: int | None) -> None:
    is_terminal = sys.stdout.isatty()
    console = Console(width=width or (None if is_terminal else 120))
    run.refresh()
    console.print(_frame(run, console, height=None), highlight=False)


def show_live(run: FollowedRun) -> None:
    console = Console()
    with keys() as pressed:
        run.refresh()
        first = _frame(run, console, height=console.height)
        with Live(first, console=console, screen=True, auto_refresh=False, transient=True) as live:
            live.refresh()
            while not pressed(REFRESH):
                run.refresh()
                live.update(_frame(run, console, height=console.height), refresh=True)


def _frame(run: FollowedRun, console: Console, height: int | None) -> Group:
    return frame(run, console.width, height, ascii_only=console.options.ascii_only)


@contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits for at most the given seconds, and returns True if q or Ctrl-C was
    pressed. Inside the block Ctrl-C raises nothing, and the terminal does not show typed keys."""
    interrupts = []
    handler = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
    try:
        with _keyboard() as is_q_pressed:
            yield lambda seconds: bool(interrupts or is_q_pressed(seconds) or interrupts)
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _keyboard() -> Iterator[Callable[[float], bool]]:
    if not sys.stdin.isatty():
        yield lambda seconds: bool(time.sleep(seconds))
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield lambda seconds: _is_q_pressed(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_q_pressed(descriptor: int, seconds: float) -> bool:
    """Waits for a key, at most for these seconds. The end of the input counts as q."""
    if not select.select([descriptor], [], [], seconds)[0]:
        return False
    typed = os.read(descriptor, 64)
    return not typed or b"q" in typed.lower()
