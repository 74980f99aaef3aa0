"""Runs a job whose output goes to a file, and reads the end of the file if the job fails."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.api import run_job

TIMEOUT = 3600.0
"""Seconds after which a job is ended."""
LINES = 12
"""Maximum number of lines of a log that are shown."""


def logged_job(words: Sequence[str], log: Path, **options: Any) -> str:
    """Runs `python -m WORDS` with its output in the file `log`. Returns "" if it succeeded, else how it ended
    and the end of its log. `options`: see `run_job`."""
    with log.open("wb") as file:
        try:
            code = run_job(words, file, timeout=TIMEOUT, **options)
        except TimeoutError:
            return f"it was ended after {TIMEOUT:g} s; {_read_end(log)}"
    return f"it ended with code {code}; {_read_end(log)}" if code else ""


def _read_end(log: Path) -> str:
    """Returns the first error of a command and the lines after it; without one the last lines."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    shown = lines[errors[0] : errors[0] + LINES] if errors else lines[-LINES:]
    return "\n".join([f"the end of {log}:", *shown])
