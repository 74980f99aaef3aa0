"""Locks a folder for one living process. The operating system releases the lock when the process dies."""

import errno
import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from openrlhf.errors import ErrorCode, UsageError

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the locked file, which contains its owner."""


@contextmanager
def locked(folder: str | os.PathLike, *, flag: str) -> Iterator[None]:
    """Holds an exclusive lock on the folder inside the block. Raises UsageError, naming the owner, if another
    process holds it; warns if the file system has no locks."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with open(path / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "an unknown process"
            text = f"in use by {owner}.\nWait for that run or end it, or name another folder."
            raise UsageError(ErrorCode.IN_USE, text, flag=flag, value=path) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            logger.warning(
                "%s has no file locks (%s), so a second run in this folder is not refused",
                path,
                error.strerror,
            )
            yield
            return
        try:
            file.truncate(0)
            since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
            file.write(f"process {os.getpid()} on {platform.node()}, since {since}\n")
            file.flush()
            yield
        finally:
            # Closing the file would not release the lock if a forked process still has it open.
            fcntl.flock(file, fcntl.LOCK_UN)
