"""Abilities of the terminal."""

import os
import sys


def shows_colours() -> bool:
    """Returns True if stdout is a terminal that shows colours, and NO_COLOR is unset."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
