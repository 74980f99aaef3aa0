"""Folders of the cache that one process of the machine fills."""

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from openrlhf.files import replacing


def made_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Returns `folder`, after `fill` has filled it if it does not exist yet. One process of the machine fills
    it while the others wait."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.exists():
                with replacing(folder) as beside:
                    beside.mkdir()
                    fill(beside)
    return folder
