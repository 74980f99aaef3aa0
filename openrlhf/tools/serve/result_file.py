"""The output file of batch inference: it grows row by row, survives a kill, and ends up complete and sorted.

Rank 0 appends to the file itself, rank N to `FILE.rankN.jsonl`. `merge` brings them together.
"""

import glob
import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from openrlhf.api import ErrorCode, UsageError, write_atomically

Row = dict[str, Any]
Key = tuple[int, int]
"""(prompt_id, sample_index)"""


class ResultFile(AbstractContextManager["ResultFile"]):
    """The file that one rank appends to."""

    def __init__(self, path: str | Path, rank: int = 0) -> None:
        """Drops a half-written last line, which a killed run leaves."""
        path = Path(path)
        self._path = path if rank == 0 else path.with_name(f"{path.name}.rank{rank}.jsonl")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab")
        self._file.truncate(_whole_lines(self._path))

    def append(self, rows: Iterable[Row]) -> None:
        """Appends rows and flushes them to the operating system."""
        self._file.write("".join(_line(row) for row in rows).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def row_key(row: Row) -> Key:
    return row["prompt_id"], row["sample_index"]


def finished(path: str | Path) -> dict[Key, Row]:
    """Returns the rows of all ranks so far, by key. Raises UsageError for a line that is not such a row."""
    rows: dict[Key, Row] = {}
    for file in _files(Path(path)):
        whole = file.read_bytes()[: _whole_lines(file)]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                rows[row_key(row)] = row
            except (ValueError, TypeError, KeyError) as error:
                text = "not a row that batch_inference wrote. Remove the line, or the file."
                raise UsageError(ErrorCode.INVALID_ROW, text, value=file, row=number) from error
    return rows


def merge(path: str | Path) -> list[Row]:
    """Merges the rows of all ranks into one sorted file, removes the others' files, and returns the rows."""
    path = Path(path)
    rows = [row for _, row in sorted(finished(path).items())]
    write_rows(path, rows)
    for file in _files(path)[1:]:
        file.unlink()
    return rows


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Replaces the file by these rows atomically: a killed process leaves the file as it was."""
    write_atomically(Path(path), map(_line, rows))


def check_origin(path: str | Path, meta_path: str | Path, origin: Mapping[str, Any]) -> None:
    """Raises UsageError if the file at `path` has another origin. `origin`: name -> JSON value, for
    everything that determines the rows."""
    error = partial(UsageError, ErrorCode.OTHER_RUN, flag="--output_path", value=path)
    if not Path(meta_path).exists():
        if _files(Path(path)):
            raise error(
                f"the file exists, but {meta_path}, which records how its rows were made,\ndoes not. "
                "Name another file, or remove this one."
            )
        return
    before = json.loads(Path(meta_path).read_text(encoding="utf-8"))
    now = json.loads(json.dumps(origin))
    changed = [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in before | now
        if before.get(name) != now.get(name)
    ]
    if changed:
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        raise error(
            f"was made with other flags or rows: {'; '.join(changed[:3])}{more}.\n"
            f"Repeat that command to continue it, name another file, or remove it and {meta_path}."
        )


def write_origin(meta_path: str | Path, origin: Mapping[str, Any]) -> None:
    Path(meta_path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(meta_path), [json.dumps(origin, indent=1), "\n"])


def _files(path: Path) -> list[Path]:
    others = sorted(path.parent.glob(f"{glob.escape(path.name)}.rank*.jsonl"))
    return ([path] if path.exists() else []) + others


def _whole_lines(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
