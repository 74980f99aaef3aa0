"""A folder that one living process has for itself. The operating system frees it when the process dies."""

import errno
import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""The locked file, in which its owner stands."""


@contextmanager
def locked(folder: str | os.PathLike, *, flag: str) -> Iterator[None]:
    """Inside, no other process gets past this for the same folder. ValueError, with who holds it, where one
    has it; a warning where the file system knows no locks."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with open(path / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{flag} {path}: a living run uses it: {file.read().strip() or 'it does not say which'}.\n"
                "Wait for that run or end it, or name another folder."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            logger.warning("%s: no locks there, so nothing keeps a second run out: %s", path, error.strerror)
            yield
            return
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}, since {_now()}\n")
            file.flush()
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also where a forked process still has the file


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
