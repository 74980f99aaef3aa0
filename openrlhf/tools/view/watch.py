"""Shows a run on one screen, while it runs or after its end: steps and remaining time, phases, curves,
sampling, warnings and the newest samples. Reads only the run folder."""

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.api import short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser
from openrlhf.tools.view.view import runs_of

if TYPE_CHECKING:
    from rich.console import Console, Group

    from openrlhf.tools.view.followed_run import FollowedRun

REFRESH = 0.5
"""Seconds between two frames."""


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="openrlhf watch", description=__doc__, epilog="Leave with q or Ctrl-C; the run goes on."
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="run folder, or an output folder for its newest run"
    )
    parser.add_argument(
        "--once", action="store_true", help="print one frame as text and exit (default without a terminal)"
    )
    parser.add_argument(
        "--width",
        type=_width,
        metavar="N",
        help="columns of a printed frame (default: the terminal's, or 120)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        options = make_parser().parse_args(argv)
        from openrlhf.tools.view.followed_run import FollowedRun

        run = FollowedRun(find_run(options.run))
        if options.once or not sys.stdout.isatty():
            show_once(run, options.width)
        else:
            show_live(run)


def find_run(path: Path) -> Path:
    """Returns the run folder that a path names: itself, or the newest run below it. Raises UsageError if
    there is none."""
    return max(runs_of([path]), key=_last_change)


def _last_change(run: Path) -> float:
    files = [run / "metrics.jsonl", run / "argv.txt"]
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)


def show_once(run: "FollowedRun", width: int | None) -> None:
    """Prints one frame."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    console = Console(width=width or (None if is_terminal else 120))
    run.refresh()
    console.print(_frame(run, console, height=None), highlight=False)


def show_live(run: "FollowedRun") -> None:
    """Shows frames on the terminal until q or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with keys() as pressed:
        run.refresh()
        first = _frame(run, console, height=console.height)
        with Live(first, console=console, screen=True, auto_refresh=False, transient=True) as live:
            live.refresh()
            while not pressed(REFRESH):
                run.refresh()
                live.update(_frame(run, console, height=console.height), refresh=True)


def _frame(run: "FollowedRun", console: "Console", height: int | None) -> "Group":
    from openrlhf.tools.view.run_screen import frame

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
    import termios
    import tty

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


def _width(text: str) -> int:
    if (width := int(text)) < 20:
        raise argparse.ArgumentTypeError(f"{width} is not at least 20")
    return width


if __name__ == "__main__":
    main()
