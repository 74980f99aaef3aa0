"""Unpacks gzip files once into the cache folder, from where they are read under their own name.

<cache folder>/unpacked/<version of the file>/<its name without .gz>
"""

import gzip
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

from openrlhf.data.cache import digest
from openrlhf.data.files import PACKED, File
from openrlhf.data.once import made_once
from openrlhf.errors import ErrorCode
from openrlhf.files import writing_to_cache

MAGIC = b"\x1f\x8b"
MAX_RATIO, SMALL = 200, 2**30
"""Maximum size of a content, in sizes of the packed file; contents of up to `SMALL` bytes may have more."""


def unpacked(file: File) -> File:
    """Returns the unpacked file, or the file itself if it is not packed. Raises UsageError if it is
    damaged, or the cache folder has no room for it."""
    if file.path.suffix != PACKED or file.path.is_dir():
        return file
    stat = file.path.stat()
    version = digest([str(file.path.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns])[:16]
    writing = writing_to_cache(
        "it cannot be unpacked to", flag=file.flag, value=file.name, otherwise=", or name the unpacked file"
    )
    try:
        with writing as cache:
            folder = made_once(cache / "unpacked" / version, partial(_unpack, file.path))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise file.error(ErrorCode.UNREADABLE, f"damaged ({stat.st_size} bytes): {error}") from error
    return replace(file, path=folder / file.path.stem)


def _unpack(path: Path, folder: Path) -> None:
    with path.open("rb") as packed:
        is_packed = packed.read(len(MAGIC)) == MAGIC  # a web server may have unpacked it on the way
    with (gzip.open if is_packed else open)(path, "rb") as opened, (folder / path.stem).open("wb") as copy:
        while block := opened.read(2**20):
            if copy.tell() > max(SMALL, MAX_RATIO * path.stat().st_size):
                raise gzip.BadGzipFile(f"more than {MAX_RATIO} times its size are packed in it")
            copy.write(block)
