"""Reads rows from json, jsonl, csv, parquet and arrow files.

Rows are parsed on access, so a dataset may be larger than memory: for .jsonl and .csv files only the offsets
of the rows are held in memory, and tables are memory-mapped. A .json file that is one list is held whole.

A row keeps the types that its file gives it. The JSON reader of `datasets` turns every "1" of a column into a
number when one row holds a number, and its JSON columns lose digits of floats; so JSON is read with the
standard library and stays as Python values. CSV has no types: every value is text.
"""

import codecs
import csv
import errno
import io
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path, PurePath
from typing import IO, Any, AnyStr, BinaryIO, NoReturn, TypeVar, cast

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from openrlhf.config.choices import BadRows
from openrlhf.errors import ErrorCode, RunError, UsageError, first_line
from openrlhf.files import writing_to_cache
from openrlhf.observability.waits import tracked

Row = dict[str, Any]
ReadT = TypeVar("ReadT")

REMEDY = "Fix the row, or leave such rows out with --data.bad_rows skip."


class BadRow(UsageError):
    """The reason why a row cannot be read or used. Under `--data.bad_rows skip` it stands in the place of an
    unreadable row; else it becomes an error with the file and the row."""

    def __init__(self, text: str, code: ErrorCode = ErrorCode.INVALID_ROW, line: int | None = None) -> None:
        """line: the line within the text that is read, from 1."""
        super().__init__(code, text, row=line)
        self.args = (text, code, line)  # pickle creates a copy with these arguments

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class File:
    """A file, or the folder of a saved dataset."""

    path: Path
    """Local path of the content."""
    name: str
    """Name in messages: the path, or the URL that the content was fetched from."""
    flag: str
    """Flag that names the file, with its dashes."""

    def error(self, code: ErrorCode, text: str, row: int | None = None) -> UsageError:
        return UsageError(code, text, flag=self.flag, value=self.name, row=row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The rows of one file, saved folder or hub dataset."""

    name: str
    rows: "Sequence[Row | BadRow] | RowsOnDisk | datasets.Dataset"
    columns: tuple[str, ...]
    """Columns that at least one row has."""
    kinds: "Kinds" = field(default_factory=dict)
    """Kinds of values by column; empty for tables, see `kinds_of`."""
    lines: Sequence[int] | np.ndarray | None = None
    """Line of each row, where the format has lines."""

    @classmethod
    def of(cls, name: str, rows: Sequence[Row | BadRow]) -> "Part":
        kinds: Kinds = {}
        for i, row in enumerate(rows):
            _note_kinds(kinds, row, i)
        return cls(name=name, rows=rows, columns=tuple(kinds), kinds=kinds)

    @classmethod
    def from_table(cls, name: str, rows: datasets.Dataset) -> "Part":
        """Raises UsageError for a dataset with a transform."""
        if rows.format["type"] == "custom":
            text = f"{name}: the dataset has a transform, which is not read. Apply it with its method map."
            raise UsageError(ErrorCode.UNSUPPORTED, text)
        return cls(name=name, rows=_as_saved(rows), columns=tuple(rows.column_names))

    @property
    def folder(self) -> Path | None:
        """Parent folder of the file, or the folder of a saved dataset; None for a hub dataset."""
        place = Path(self.name)
        if not place.exists():
            return None
        return place if place.is_dir() else place.parent

    def number(self, row: int) -> int:
        """Returns the line of a row, or its number from 1 where the format has no lines."""
        return row + 1 if self.lines is None else int(self.lines[row])

    def find_kinds(self, column: str) -> Mapping[str, tuple[int, int]]:
        """Returns, for each kind of value in the column except null, (the first row with one, number of
        rows). A column of a table has a single kind."""
        if not isinstance(self.rows, datasets.Dataset):
            return {
                found: where for found, where in self.kinds.get(column, {}).items() if found != kind(None)
            }
        column_alone = cast(Iterable[Row], self.rows.select_columns([column]))
        values = ((i, row[column]) for i, row in enumerate(column_alone) if row[column] is not None)
        return {kind(value): (i, len(self.rows)) for i, value in islice(values, 1)}


def _as_saved(rows: datasets.Dataset) -> datasets.Dataset:
    """Returns rows of Python's values with all columns, whatever the format of the dataset. Images stay
    encoded instead of letting PIL decode them; data/images.py decides which may be opened. So do sound and
    videos, which nothing reads."""
    kept = copy(rows)
    kept._format_type = kept._format_columns = None  # unlike reset_format this keeps the fingerprint
    kept._info = rows.info.copy()
    kept._info.features = datasets.Features(_encoded(rows.features))
    return kept


def _encoded(feature: Any) -> Any:
    if isinstance(feature, dict):
        return {name: _encoded(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_encoded(feature.feature))
    return replace(feature, decode=False) if getattr(feature, "decode", False) else feature


Kinds = dict[str, dict[str, tuple[int, int]]]
"""Column -> kind of value -> (first row with one, number of rows), in the order of rows."""


def _note_kinds(kinds: Kinds, row: Row | BadRow, i: int) -> None:
    if isinstance(row, BadRow):
        return
    for column, value in row.items():
        of_column, found = kinds.setdefault(column, {}), kind(value)
        first, count = of_column.get(found, (i, 0))
        of_column[found] = first, count + 1


def kind(value: Any) -> str:
    """Returns the name of a value's type for messages."""
    return _KINDS.get(type(value), type(value).__name__)


_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


Version = tuple[int, ...]
"""State of a file, which differs once it has been written to or replaced."""


@dataclass(frozen=True, slots=True, eq=False)
class RowsOnDisk:
    """The rows of a text file, parsed on each access. Can be pickled."""

    file: File
    version: Version
    """State of the file in which the rows were found."""
    borders: np.ndarray
    """(rows + 1,) byte offset of each row, and the end of the file."""
    parse: Callable[[bytes], Row]
    """Parses a row from the bytes between its offset and the next one."""

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, i: int) -> Row:
        start, end = self.borders[i : i + 2].tolist()
        file = _opened(self.file, self.version)  # held: another thread may push it out of the cache
        return self.parse(os.pread(file.fileno(), end - start, start))


def _version(path: Path) -> Version:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=64)  # bounded, because a folder may have more files than a process may open
def _opened(file: File, version: Version) -> BinaryIO:
    """Opens the file and raises RunError if it changed. It is not memory-mapped: the pages of a large file
    would count as memory of every process that reads it."""
    if _version(file.path) != version:
        text = "the file changed while it was being read. Start again."
        raise RunError(ErrorCode.UNREADABLE, text, flag=file.flag, value=file.name)
    return file.path.open("rb", buffering=0)


Found = tuple[int, int, Row | BadRow]
"""(byte offset of the row, its line, the row)."""


def _on_disk(file: File, found: Iterable[Found], parse: Callable[[bytes], Row]) -> Part:
    version, borders, lines = _version(file.path), array("q"), array("q")
    kinds: Kinds = {}
    for start, line, row in found:
        _note_kinds(kinds, row, len(lines))
        borders.append(start)
        lines.append(line)
    borders.append(file.path.stat().st_size)
    return Part(
        name=file.name,
        rows=RowsOnDisk(file, version, np.array(borders, dtype=np.int64), parse),
        columns=tuple(kinds),
        kinds=kinds,
        lines=np.array(lines, dtype=np.int64),
    )


def _read_json_lines(file: File, bad_rows: BadRows) -> Part:
    return _on_disk(file, _json_lines(file, bad_rows), _parse_first_line)


def _json_lines(file: File, bad_rows: BadRows) -> Iterator[Found]:
    """Yields each line that is not blank, with its byte offset."""
    start = 0
    with file.path.open("rb") as opened:
        lines = tracked(_lines(file, opened), None, f"checking the lines of {file.path.name}")
        for line, raw in enumerate(lines, start=1):
            row = _row_or_reason(partial(_parse_line, raw, _unique), file, line, bad_rows)
            if row is not None:
                yield start, line, row
            start += len(raw)


def _lines(file: File, opened: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yields the lines, each of at most `MAX_ROW`."""
    for number, line in enumerate(iter(lambda: opened.readline(MAX_ROW + 1), opened.read(0)), start=1):
        if len(line) > MAX_ROW:
            raise file.error(ErrorCode.UNREADABLE, f"the line has more than {MAX_ROW >> 20} MiB.", number)
        yield line


def _row_or_reason(read: Callable[[], ReadT], file: File, number: int, bad_rows: BadRows) -> ReadT | BadRow:
    """Returns the result of `read`. Where that raises BadRow, returns the reason under "skip", else raises
    it with the file and the row's number."""
    try:
        return read()
    except BadRow as reason:
        if bad_rows == "skip":
            return reason
        raise file.error(reason.code, f"{reason.text}\n{REMEDY}", number) from reason


def _parse_line(raw: bytes, pairs: "Pairs | None" = None) -> Row | None:
    """Returns the row of a line, or None for a blank line. `pairs`: see `_parse_json`."""
    text = _decode(raw).strip()
    return _row(_parse_json(text, pairs)) if text else None


def _parse_first_line(raw: bytes) -> Row:
    """Parses the first line; the lines after it, up to the next row, are blank."""
    return _parse_line(raw.partition(b"\n")[0]) or {}


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: {error.reason} (byte {error.start + 1}).") from error


Pairs = Callable[[list[tuple[str, Any]]], Row]
"""Makes an object from its keys and values."""


MAX_ROW = 256 * 2**20
"""Maximum size of a line, which may hold images, and of a value in CSV."""
MAX_TEXT = 2**23
"""Maximum number of characters of a text: tokenising it takes some hundred times the memory."""
MAX_DEPTH = 100
"""Levels of nested lists and objects that a row may have. Python's parser stops at about 1,000, or earlier if
the call stack is deep."""
_TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} levels deep."


def _depth(value: Any) -> int:
    """Returns the levels of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, list | dict)]:
        depth += 1
        level = [v for part in level for v in (part.values() if isinstance(part, dict) else part)]
    return depth


def _parse_json(text: str, pairs: Pairs | None = None) -> Any:
    """Parses JSON. `pairs` makes the objects. `_unique` also refuses repeated keys, which takes a third
    longer, so it is only used when a file is checked."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=pairs)
    except RecursionError as error:
        raise BadRow(_TOO_DEEP) from error
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("<"):
            raise BadRow("this looks like HTML. Was an error page downloaded?") from error
        found = text.split("\n")[error.lineno - 1].strip()[:60]
        raise BadRow(f"not JSON: {error.msg}: {found}", line=error.lineno) from error
    except BadRow:
        raise
    except ValueError as error:  # Python reads numbers of up to 4,300 digits
        raise BadRow(f"a number has too many digits: {first_line(error)}.") from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise BadRow(_TOO_DEEP)
    if "\\ud" in text.lower():
        _refuse_half_characters(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRow(f"the key {next(key for key in made if keys.count(key) > 1)!r} occurs twice.")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise BadRow(f"{name} is not JSON. Write a number or null.")


def _refuse_half_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise BadRow(f"{half!r} is half of a surrogate pair, not a character.") from error


def _row(value: Any) -> Row:
    if not isinstance(value, dict):
        raise BadRow(f'a row must be an object such as {{"input": …}}, not {kind(value)}.')
    return value


def _read_json(file: File, bad_rows: BadRows) -> Part:
    """Reads a list of objects; or, for JSON Lines under this file ending, one object per line."""
    if _has_a_row_in_each_line(file.path):
        return _read_json_lines(file, bad_rows)
    size, limit = file.path.stat().st_size, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16
    if size > limit:
        text = f"{size} bytes; a list is held whole, and may have {limit} here. Save a .jsonl file instead."
        raise file.error(ErrorCode.UNREADABLE, text)
    try:
        value = _parse_json(_decode(file.path.read_bytes()), _unique)
    except BadRow as reason:
        raise file.error(ErrorCode.UNREADABLE, reason.text, reason.row) from reason
    if not isinstance(value, list):
        keys = f" (keys: {', '.join(value)})" if isinstance(value, dict) else ""
        raise file.error(
            ErrorCode.UNREADABLE,
            f"{kind(value)}{keys}, not a list of rows.\n"
            "Save the list itself, or one row in each line of a .jsonl file.",
        )
    return Part.of(
        file.name,
        [_row_or_reason(partial(_row, item), file, i, bad_rows) for i, item in enumerate(value, start=1)],
    )


def _has_a_row_in_each_line(path: Path) -> bool:
    """Returns True if the first line is a JSON object and another line follows, or the file is empty."""
    with path.open("rb") as file:
        read = iter(partial(file.readline, MAX_ROW + 1), b"")
        lines = (line for raw in read if (line := raw.removeprefix(codecs.BOM_UTF8).strip()))
        first, second = next(lines, b""), next(lines, b"")
    return not first or (first.startswith(b"{") and bool(second) and _is_json(first))


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return False
    return True


def _read_csv(file: File, bad_rows: BadRows) -> Part:
    columns: list[str] = []
    return _on_disk(file, _csv_rows(file, bad_rows, columns), partial(_parse_csv_row, columns=columns))


def _csv_rows(file: File, bad_rows: BadRows, columns: list[str]) -> Iterator[Found]:
    """Appends the names to `columns`, and yields each row with its byte offset; the line is the last one of
    the row."""
    csv.field_size_limit(MAX_ROW)  # the default refuses texts of more than 128 KiB
    size = 0  # of the lines that the reader has taken, in bytes
    with file.path.open(newline="", encoding="utf-8") as opened:

        def lines() -> Iterator[str]:
            nonlocal size
            for line in _lines(file, opened):
                mark = "" if size else "\ufeff"
                size += len(line.encode())
                yield line.removeprefix(mark)

        reader, line = csv.DictReader(lines(), strict=True), 1
        try:
            columns += reader.fieldnames or ()
            if twice := next((name for name in columns if name and columns.count(name) > 1), ""):
                text = f"the header has the column {twice!r} twice. Rename one of them."
                raise file.error(ErrorCode.UNREADABLE, text, line)
            start = size
            for row in reader:
                line = reader.line_num
                yield start, line, _row_or_reason(partial(_whole_row, row, columns), file, line, bad_rows)
                start = size
        except (csv.Error, UnicodeDecodeError) as error:
            text = f"not readable as CSV: {error}."
            raise file.error(ErrorCode.UNREADABLE, text, line + 1) from error


def _parse_csv_row(raw: bytes, columns: Sequence[str]) -> Row:
    text = io.StringIO(raw.decode(), newline="")
    return _whole_row(next(csv.DictReader(text, columns, strict=True)), columns)


def _whole_row(row: Row, columns: Sequence[str]) -> Row:
    if None in row or None in row.values():
        raise BadRow(f"not readable as CSV: a row must have {len(columns)} values, as the header has.")
    return row


def _read_parquet(file: File, bad_rows: BadRows) -> Part:
    """Reads a Parquet file, which cannot be memory-mapped: a large one is decoded to disk and mapped from
    there."""
    metadata = _read_table(pq.read_metadata, file)
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    read = _parquet_in_memory if size <= PARQUET_IN_MEMORY else partial(_parquet_on_disk, size=size)
    return Part.from_table(file.name, _read_table(lambda path: datasets.Dataset(read(path)), file))


PARQUET_IN_MEMORY = 64 * 2**20
"""Decoded bytes up to which a Parquet file is held in memory."""


def _parquet_in_memory(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:
        return file.read()


def _parquet_on_disk(path: Path, size: int) -> pa.Table:
    """Decodes to an unlinked Arrow file and memory-maps it; its disk space is freed when the process ends."""
    with (
        writing_to_cache(
            "its rows cannot be decoded to", value=path, otherwise=", or make a .jsonl file of it"
        ) as folder,
        tempfile.NamedTemporaryFile(dir=folder, suffix=".arrow") as copy,
        pq.ParquetFile(path) as file,
    ):
        if size > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        batches = file.iter_batches(_BATCH)
        count = -(-file.metadata.num_rows // _BATCH)
        with pa.ipc.new_stream(copy.name, file.schema_arrow) as writer:
            for batch in tracked(batches, count, f"decoding {path.name}"):
                writer.write_batch(batch)
        return _arrow_table(Path(copy.name))


_BATCH = 4096
"""Rows that are decoded at once."""


def _read_arrow(file: File, bad_rows: BadRows) -> Part:
    return Part.from_table(file.name, _read_table(lambda path: datasets.Dataset(_arrow_table(path)), file))


def _arrow_table(path: Path) -> pa.Table:
    """Memory-maps an Arrow file of either format (file or stream)."""
    source = pa.memory_map(str(path))
    is_file_format = source.read(6) == b"ARROW1"
    source.seek(0)
    return (pa.ipc.open_file(source) if is_file_format else pa.ipc.open_stream(source)).read_all()


def _read_table(read: Callable[[Path], Any], file: File) -> Any:
    try:
        return read(file.path)
    except UsageError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:  # KeyError: two columns of a name
        size, ending = file.path.stat().st_size, file.path.suffix
        text = f"damaged, not a {ending} file, or of types without rows ({size} bytes):\n{first_line(error)}"
        raise file.error(ErrorCode.UNREADABLE, text) from error


READERS: Mapping[str, Callable[[File, BadRows], Part]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""Maps a file ending to its reader. Tables have no bad rows."""

PACKED = ".gz"
ENDINGS = f"{', '.join(READERS)}, or one of these and {PACKED}"
"""Supported file endings, for messages."""


def has_rows(name: str | PurePath) -> bool:
    """Returns whether a file of this name has a reader."""
    path = PurePath(name)
    return PurePath(path.stem if path.suffix == PACKED else path).suffix in READERS


def peek(file: File, bad_rows: BadRows) -> Part:
    """Reads only the first rows or the schema of a file."""
    ending = file.path.suffix
    if ending == ".parquet":
        schema = _read_table(pq.read_schema, file)
        return Part(name=file.name, rows=[], columns=tuple(schema.names))
    if ending in (".jsonl", ".csv"):
        found = _json_lines(file, bad_rows) if ending == ".jsonl" else _csv_rows(file, bad_rows, [])
        return Part.of(file.name, [row for _, _, row in islice(found, 100)])
    return READERS[ending](file, bad_rows)
