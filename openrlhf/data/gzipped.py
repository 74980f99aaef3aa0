"""Files packed with gzip: unpacked once into the cache folder, and read from there by their own name.

<cache folder>/unpacked/<version of the file>/<its name without .gz>
"""

import gzip
import os
import shutil
import zlib
from pathlib import Path

from filelock import FileLock

from openrlhf.data.cache import digest
from openrlhf.data.files import PACKED, File
from openrlhf.files import cache_folder, replacing

MAGIC = b"\x1f\x8b"


def unpacked(file: File, flag: str) -> File:
    """The file as it is read. ValueError where it is damaged, or the cache folder has no room for it."""
    if file.path.suffix != PACKED or file.path.is_dir():
        return file
    stat = file.path.stat()
    version = digest([str(file.path.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns])[:16]
    folder = cache_folder() / "unpacked" / version
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{version}.lock")):
            if not folder.exists():
                _unpack(file, folder)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{flag} {file}: damaged ({stat.st_size} bytes): {error}") from error
    except OSError as error:
        raise ValueError(
            f"{flag} {file}: it cannot be unpacked to {folder}: {os.strerror(error.errno or 0)}.\n"
            "Set OPENRLHF_CACHE to a folder with space that you may write to, or name the unpacked file."
        ) from error
    return File(folder / file.path.stem, file.name)


def _unpack(file: File, folder: Path) -> None:
    with file.path.open("rb") as packed:
        is_packed = packed.read(len(MAGIC)) == MAGIC  # a web server may have unpacked it on the way
    open_rows = gzip.open if is_packed else open
    with open_rows(file.path, "rb") as opened, replacing(folder) as beside:
        beside.mkdir()
        with (beside / file.path.stem).open("wb") as copy:
            shutil.copyfileobj(opened, copy, 2**20)
