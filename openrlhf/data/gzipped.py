"""Unpacks gzip files once into the cache folder, from where they are read under their own name.

<cache folder>/unpacked/<version of the file>/<its name without .gz>
"""

import gzip
import shutil
import zlib
from functools import partial
from pathlib import Path

from openrlhf.data.cache import digest
from openrlhf.data.files import PACKED, File
from openrlhf.files import made_once, writing_to_cache

MAGIC = b"\x1f\x8b"


def unpacked(file: File, flag: str) -> File:
    """Returns the unpacked file, or the file itself if it is not packed. Raises ValueError where it is
    damaged, or the cache folder has no room for it."""
    if file.path.suffix != PACKED or file.path.is_dir():
        return file
    stat = file.path.stat()
    version = digest([str(file.path.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns])[:16]
    try:
        with writing_to_cache(
            f"{flag} {file}: it cannot be unpacked to", ", or name the unpacked file"
        ) as cache:
            folder = made_once(cache / "unpacked" / version, partial(_unpack, file.path))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{flag} {file}: damaged ({stat.st_size} bytes): {error}") from error
    return File(folder / file.path.stem, file.name)


def _unpack(path: Path, folder: Path) -> None:
    with path.open("rb") as packed:
        is_packed = packed.read(len(MAGIC)) == MAGIC  # a web server may have unpacked it on the way
    with (gzip.open if is_packed else open)(path, "rb") as opened, (folder / path.stem).open("wb") as copy:
        shutil.copyfileobj(opened, copy, 2**20)
