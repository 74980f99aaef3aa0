"""Damages to the files of a checkpoint folder, for tests of what a run resumes from."""

import random
from pathlib import Path

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
