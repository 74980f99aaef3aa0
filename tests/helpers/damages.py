"""Damages to the files of a checkpoint folder, for tests of what a run resumes from."""

import gc
import os
import pickle
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NOBODY = 65534
"""Number of the user without rights."""

DAMAGES = ("truncate", "flip", "delete", "swap", "zero")
"""Cuts a file; flips a bit; deletes the file; puts the same file of an older step in its place; overwrites a
block with zeros."""


def damage(kind: str, file: Path, older: Path, rng: random.Random) -> bool:
    """Damages `file` in one of the ways of DAMAGES; returns whether its content has changed. `older`: the
    file that replaces it in a swap, if it is there."""
    data = file.read_bytes()
    place = rng.randrange(max(1, len(data)))
    if kind == "delete":
        file.unlink()
        return True
    if kind == "truncate":
        new = data[:place]
    elif kind == "flip":
        new = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
    elif kind == "zero":
        block = min(512, len(data) - place)
        new = data[:place] + bytes(block) + data[place + block :]
    else:
        new = older.read_bytes() if older.exists() else b"global_step2"
    file.write_bytes(new)
    return new != data


def _fifo(file: Path) -> None:
    os.mkfifo(file)


def _loop(file: Path) -> None:
    file.symlink_to(file.name)


def _huge(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(1 << 40)  # without blocks on the disk


IN_ITS_PLACE: Mapping[str, Callable[[Path], object]] = {
    "nothing": lambda file: file.write_bytes(b""),
    "binary": lambda file: file.write_bytes(b"\xff\x00\x80" * 50),
    "list": lambda file: file.write_bytes(b"[]"),
    "null": lambda file: file.write_bytes(b"null"),
    "wrong types": lambda file: file.write_bytes(
        b'{"metric_value": "x", "origin": {"flags": 1}, "written": [], "format": "x", "files": 3, "step": []}'
    ),
    "deep": lambda file: file.write_bytes(b"[" * 100_000),
    "folder": lambda file: file.mkdir(),
    "fifo": _fifo,
    "loop": _loop,
    "huge": _huge,
}
"""Name of what stands in a file's place -> the function that creates it."""


def put_in_place(kind: str, file: Path) -> None:
    """Replaces a file by one of IN_ITS_PLACE."""
    file.unlink(missing_ok=True)
    IN_ITS_PLACE[kind](file)


def as_another_user(call: Callable[[], Any], folder: Path) -> Any:
    """Returns the result of `call` in a forked process without the rights of root, which then owns `folder`.
    Root may read every file, whatever its mode."""
    here, there = os.pipe()
    if not (child := os.fork()):
        gc.disable()  # the end of a C++ object whose threads are not here would end this process
        try:
            if os.geteuid() == 0:
                for path in (folder, *folder.rglob("*")):
                    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            result = (True, call())
        except BaseException as error:
            result = (False, f"{type(error).__name__}: {error}")
        with os.fdopen(there, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        held, result = pickle.load(pipe)  # from the fork of this process
    os.waitpid(child, 0)
    assert held, result
    return result
