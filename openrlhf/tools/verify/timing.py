"""A clock for the seconds of each check."""

import time


class Clock:
    """Measures the seconds between calls."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        """Returns the seconds since the last call."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        return seconds
