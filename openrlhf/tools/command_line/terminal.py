"""Abilities of the terminal; consoles and tables of the tools' output."""

import os
import sys
from collections.abc import Container
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openrlhf.api import clean_text

WIDTH = 118
"""Width of the output in columns if the stream is no terminal."""


def shows_colours() -> bool:
    """Returns True if stdout is a terminal that shows colours, and NO_COLOR is unset."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def build_console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else WIDTH, highlight=False)


def colour_console(stream: TextIO) -> Console:
    """Builds a console that has colours if stdout shows them."""
    coloured = shows_colours()
    return Console(file=stream, force_terminal=coloured, color_system="auto" if coloured else None)


def say(console: Console, text: str | Text, style: str = "") -> None:
    """Prints a text without control characters, whose long lines the terminal breaks."""
    text = text if isinstance(text, Text) else Text(clean_text(text), style=style)
    console.print(text, soft_wrap=True, highlight=False)


def build_table(title: str, *columns: str, right: Container[str] = ()) -> Table:
    """Builds a table without lines. `title`: "" for none. `right`: the columns that are aligned to the
    right."""
    found = Table(title=title and f"\n{title}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        found.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return found
