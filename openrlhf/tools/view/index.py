"""Indexes the journals of runs in DuckDB, in a separate thread, the newest steps first.

The index has a row for each rollout, with its facts and texts but without its tokens. Each run's index is a
file in `$OPENRLHF_CACHE/view`, so that the next viewer reads only new steps. If the file cannot be used, for
instance because another viewer has it open, the index is built in memory."""

import hashlib
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from openrlhf.api import JOURNAL_FILE, RunFolder, cache_folder, read_table

POLL_SECONDS = 2.0
"""Time between two scans of the folders of journals."""
BATCH_FILES = 32
"""Maximum number of files that one transaction indexes."""
MEMORY = "2GB"
"""DuckDB's memory limit, above which it spills to disk."""
FORMAT = 1
"""Version of the tables. It is part of the file's name, so that versions do not share a file."""

FILES = "file VARCHAR, mtime BIGINT, size BIGINT"
FACTS = {
    "prompt_id": "BIGINT",
    "epoch": "BIGINT",
    "sample_index": "INTEGER",
    "part": "INTEGER",
    "source": "VARCHAR",
    "reward": "DOUBLE",
    "score": "DOUBLE",
    "outcome": "VARCHAR",
    "error": "VARCHAR",
    "finish_reason": "VARCHAR",
    "truncated": "BOOLEAN",
    "extra_logs": "STRUCT(name VARCHAR, value DOUBLE)[]",
    "prompt": "VARCHAR",
    "response": "VARCHAR",
}
"""Columns that the index copies from the journal, with their types."""
DERIVED = {
    "length": ("BIGINT", "action_ranges", 'list_sum(list_transform({}, lambda r: r."end" - r."start"))'),
    "turns": ("BIGINT", "turn_starts", "len({})"),
    "version": ("INTEGER", "weight_versions", "list_max(list_transform({}, lambda r: r.version))"),
    "num_images": ("BIGINT", "images", "len({})"),
}
"""Column of the index -> (type, column of the journal, SQL expression of it). `length` is the number of
tokens that the policy chose, and `version` the newest weight version that sampled them."""
PLACE = {"file": "VARCHAR", "row": "BIGINT", "kind": "VARCHAR", "step": "BIGINT"}
"""Place of a rollout: file of the journal, row in it, and the two parts of the file's name."""
WANTED = [*FACTS, *(column for _, column, _ in DERIVED.values())]
"""Columns of the journal that are read."""
TYPES = PLACE | FACTS | {name: type_ for name, (type_, _, _) in DERIVED.items()}


class FileState(NamedTuple):
    mtime: int
    """Time of the last change, in nanoseconds."""
    size: int
    """Bytes."""


@dataclass(slots=True)
class Indexed:
    """State of the index of one run."""

    folder: RunFolder
    note: str = ""
    """Reason why the index is in memory; empty if it is a file."""
    known: dict[str, FileState] = field(default_factory=dict)
    """Indexed files, in the state in which they were read."""
    damaged: dict[str, tuple[FileState, str]] = field(default_factory=dict)
    """Files that could not be read, with the reasons."""
    waiting: list[str] = field(default_factory=list)
    """Files that are not indexed yet, the newest step first."""


class Index:
    """The rollouts of several runs as one SQL view `rollouts`, whose column `run` numbers the runs from 0."""

    def __init__(self, folders: Sequence[Path], *, cache: Path | None = None) -> None:
        """`cache`: folder of the index files, by default in the user's cache folder."""
        self._cache = cache_folder() / "view" if cache is None else cache
        self._database = duckdb.connect(
            config={
                "threads": min(8, os.cpu_count() or 1),
                "memory_limit": MEMORY,
                "temp_directory": str(self._cache / "spilled"),
                "autoinstall_known_extensions": False,
            }
        )
        self.runs = [Indexed(RunFolder(folder)) for folder in folders]
        for i, run in enumerate(self.runs):
            self._attach(i, run)
        parts = (f"SELECT {i} AS run, rowid AS id, * FROM run{i}.rollouts" for i in range(len(folders)))
        self._database.execute(f"CREATE VIEW rollouts AS {' UNION ALL '.join(parts)}")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="index", daemon=True)
        self.error = ""
        """Error of the last update; empty after one that succeeded."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()  # bounded: one batch of files
        self._database.close()

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Runs a query and returns its rows as dictionaries. May be called from any thread."""
        with self._database.cursor() as cursor:
            found = cursor.execute(query, list(values))
            names = [column[0] for column in found.description]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def num_rows(self, i: int) -> int:
        return self.rows(f"SELECT count(*) AS n FROM run{i}.rollouts")[0]["n"]

    def update(self) -> bool:
        """Scans the folders, and indexes at most one batch of files for each run. Returns True if more files
        wait."""
        for i, run in enumerate(self.runs):
            states = self._scan(i, run)
            if batch := run.waiting[:BATCH_FILES]:
                self._add(i, run, {name: states[name] for name in batch})
                run.waiting = run.waiting[BATCH_FILES:]
        return any(run.waiting for run in self.runs)

    def _work(self) -> None:
        """Updates until the end. After an error, which the page shows, it tries again."""
        while not self._stopped.is_set():
            try:
                has_more, self.error = self.update(), ""
            except Exception as error:
                has_more, reason = False, f"{type(error).__name__}: {error}"
                self.error = f"indexing new rollouts failed ({reason}); it is tried again"
            if not has_more:
                self._stopped.wait(POLL_SECONDS)

    def _attach(self, i: int, run: Indexed) -> None:
        digest = hashlib.sha256(os.fsencode(run.folder.path.resolve())).hexdigest()[:24]
        path = self._cache / f"{digest}_{FORMAT}.duckdb"
        try:
            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database.execute(f"ATTACH {_quoted(str(path))} AS run{i}")
            self._create(i, run)
        except (duckdb.Error, OSError) as error:
            run.note = (
                f"the index of this run is in memory, so the next viewer builds it again: {path} cannot be "
                f"used: {error}"
            )
            self._database.execute(f"DETACH DATABASE IF EXISTS run{i}")
            self._database.execute(f"ATTACH ':memory:' AS run{i}")
            self._create(i, run)

    def _create(self, i: int, run: Indexed) -> None:
        columns = ", ".join(f'"{name}" {type_}' for name, type_ in TYPES.items())
        self._database.execute(f"CREATE TABLE IF NOT EXISTS run{i}.files ({FILES})")
        self._database.execute(f"CREATE TABLE IF NOT EXISTS run{i}.rollouts ({columns})")
        known = self.rows(f"SELECT * FROM run{i}.files")
        run.known = {row["file"]: FileState(row["mtime"], row["size"]) for row in known}

    def _scan(self, i: int, run: Indexed) -> dict[str, FileState]:
        """Compares the folder with the index: forgets files that are gone, and lists new and changed ones.
        Returns the state of each file."""
        there = _journals(run.folder.rollouts_path)
        if gone := [name for name in run.known if name not in there]:
            self._forget(i, run, gone)
        run.damaged = {name: bad for name, bad in run.damaged.items() if there.get(name) == bad[0]}
        changed = (name for name, state in there.items() if run.known.get(name) != state)
        run.waiting = sorted((name for name in changed if name not in run.damaged), key=_step, reverse=True)
        return there

    def _forget(self, i: int, run: Indexed, names: Sequence[str]) -> None:
        with self._database.cursor() as cursor:
            cursor.begin()
            self._delete(cursor, i, names)
            cursor.commit()
        run.known = {name: state for name, state in run.known.items() if name not in names}

    def _add(self, i: int, run: Indexed, states: dict[str, FileState]) -> None:
        """Indexes files in one transaction, or one by one if any of them cannot be read."""
        try:
            self._insert(i, run, states)
        except (duckdb.Error, OSError, ValueError) as error:
            if len(states) == 1:
                run.damaged |= {name: (state, str(error)) for name, state in states.items()}
                return
            for name, state in states.items():
                self._add(i, run, {name: state})

    def _insert(self, i: int, run: Indexed, states: dict[str, FileState]) -> None:
        columns = ", ".join(map(_name, TYPES))
        with self._database.cursor() as cursor:
            cursor.begin()
            self._delete(cursor, i, list(states))
            for name in states:
                table = read_table(run.folder.rollouts_path / name, WANTED)
                numbered = table.append_column("row", pa.array(range(len(table))))
                cursor.register("journal", numbered)
                cursor.execute(f"INSERT INTO run{i}.rollouts ({columns}) {_selection(name, numbered)}")
            rows = [(name, *state) for name, state in states.items()]
            cursor.executemany(f"INSERT INTO run{i}.files VALUES (?, ?, ?)", rows)
            cursor.commit()
        run.known |= states

    def _delete(self, cursor: duckdb.DuckDBPyConnection, i: int, names: Sequence[str]) -> None:
        for table in ("rollouts", "files"):
            cursor.execute(f"DELETE FROM run{i}.{table} WHERE file IN (SELECT unnest(?))", [list(names)])


def _selection(file: str, table: pa.Table) -> str:
    """Returns the query for the columns of the index. Copied columns that the journal lacks, because an
    earlier version wrote it, are null, and derived ones are 0."""
    expressions = {
        "file": _quoted(file),
        "row": _name("row"),
        "kind": _quoted(file.rpartition("_")[0]),
        "step": str(_step(file)),
        **{name: _name(name) if name in table.column_names else "NULL" for name in FACTS},
        **{
            name: f"coalesce({expression.format(_name(column))}, 0)" if column in table.column_names else "0"
            for name, (_, column, expression) in DERIVED.items()
        },
    }
    return f"SELECT {', '.join(f'{expressions[name]} AS {_name(name)}' for name in TYPES)} FROM journal"


def _journals(folder: Path) -> dict[str, FileState]:
    states = {}
    for path in folder.glob("*"):
        if JOURNAL_FILE.fullmatch(path.name):
            with suppress(FileNotFoundError):  # a resumed run has just removed it
                stat = path.stat(follow_symlinks=path.exists())  # a loop of links is told when it is read
                states[path.name] = FileState(stat.st_mtime_ns, stat.st_size)
    return states


def _step(name: str) -> int:
    match = JOURNAL_FILE.fullmatch(name)
    return int(match["step"]) if match else 0


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'
