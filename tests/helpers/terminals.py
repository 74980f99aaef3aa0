"""Streams, clocks and lines of what is shown while something runs."""

import io
import os
import pty
import re
import threading
import tty

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
