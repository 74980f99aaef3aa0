"""Loads the rows that a data flag names: files, folders, URLs and hub names, mixed, capped and checked."""

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, NoReturn, cast

import datasets
import numpy as np
import pandas as pd
from datasets.data_files import FILES_TO_IGNORE

from openrlhf.config.checks import missing, parse_probabilities, split_spec
from openrlhf.config.choices import BadRows
from openrlhf.config.reasoning_gym import is_gym
from openrlhf.data.cache import digest, file_digest
from openrlhf.data.files import ENDINGS, PACKED, READERS, REMEDY, BadRow, File, Part, Row, has_rows, peek
from openrlhf.data.gzipped import unpacked
from openrlhf.data.reasoning_gym import COLUMNS, gym_dataset, gym_rows
from openrlhf.data.remote import fetched, is_saved_dataset, is_url
from openrlhf.data.row_func import LeftOut, RowFunction, row_function
from openrlhf.errors import ErrorCode, UsageError, counted, first_line, notify_once
from openrlhf.hub import dataset_folder, uses_modelscope
from openrlhf.observability.waits import tracked


class Rows:
    """Rows of one or several parts, in the order in which they are used."""

    def __init__(
        self,
        parts: Sequence[Part],
        index: np.ndarray,
        kinds: Mapping[str, str] | None = None,
        convert: RowFunction | None = None,
    ):
        """index: (rows, 2) number of the part, and of the row within it.
        kinds: column -> the kind of value that it has in most rows, where rows with other kinds are to be
        skipped.
        convert: the function of `row_function`, called on each access of a row.
        """
        self._parts = tuple(parts)
        self._index = index
        self.kinds = kinds or {}
        self._convert = convert

    @classmethod
    def of(cls, rows: Sequence[Row], name: str = "rows") -> "Rows":
        return cls([Part.of(name, rows)], whole_part(0, len(rows)))

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> Row:
        """Returns row i. Raises BadRow if the file has no valid row there, which only happens under
        `bad_rows` skip, and what `convert` raises."""
        part, number = self._index[i].tolist()
        row = self._parts[part].rows[number]
        if isinstance(row, BadRow):
            raise row
        return row if self._convert is None else self._convert(deepcopy(row))  # which may change its row

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def take(self, numbers: Sequence[int]) -> "Rows":
        """Returns the rows with these numbers, which may repeat."""
        return Rows(self._parts, self._index[list(numbers)], self.kinds, self._convert)

    def place(self, i: int) -> tuple[str, int]:
        """Returns the file of row i and the row's line, or its number where the format has no lines, from
        1."""
        part, row = self._index[i].tolist()
        return self._parts[part].name, self._parts[part].number(row)

    def origin(self, i: int) -> str:
        """Returns the place of row i as text: "train.jsonl:3"."""
        return "{}:{}".format(*self.place(i))

    def folder(self, i: int) -> Path | None:
        """Returns the folder of the file that holds row i; None where it comes from the hub."""
        return self._parts[self._index[i, 0]].folder


def load_rows(
    spec: Any,
    *,
    flag: str,
    required_columns: Mapping[str, str | None],
    probs: str | None = None,
    split: str = "train",
    max_samples: int | None = None,
    seed: int = 42,
    bad_rows: BadRows = "error",
    row_func: str | None = None,
) -> Rows:
    """Loads the rows that `spec` names: a comma-separated list of `path[@data_dir]`.

    An item is a .json, .jsonl, .csv, .parquet or .arrow file, one of these packed as .gz, a `save_to_disk`
    folder, a folder of such files, the URL of any of them, a name on the hub, or
    `reasoning_gym:NAME?size=N&seed=S`. A piece of `spec` that exists on disk with its commas and "@" is one
    path. Where an item has splits, only `split` is loaded; in a folder of files, the files with that word in
    their names. `spec` may also be the rows themselves: see `_given`.

    required_columns: flag -> the column it names, None where the flag is unset. Each must exist in every
        part and hold one type throughout; readers of rows handle missing and null values.
    probs: "0.7,0.3" draws from the items with these probabilities until each has been used up once,
        repeating those that end earlier (`datasets.interleave_datasets`, all_exhausted); None puts one item
        after the other.
    max_samples: maximum number of rows of each item, and of the whole.
    bad_rows: "skip" keeps lines that are not rows and values of a rarer type, which readers of rows skip.
    row_func: reference of a function that each row passes through, see `row_function`. Then the columns are
        checked row by row.

    Prints a note with the columns that no flag names. Raises UsageError, at most three lines, for anything
    wrong with the flag, a file or a line of it.
    """
    parts: list[Part] = []
    items: list[np.ndarray] = []
    if convert := row_function(row_func):
        required_columns = {}
    for item in split_spec(spec) if isinstance(spec, str) else [spec]:
        loaded = _load(item, split, flag, bad_rows) if isinstance(item, str) else [_given(item, split, flag)]
        indices = [whole_part(len(parts) + i, len(part.rows)) for i, part in enumerate(loaded)]
        parts += loaded
        items.append(np.concatenate(indices)[:max_samples])
    if not items:
        raise UsageError(ErrorCode.INVALID_VALUE, "expects the name of a dataset", flag=flag, value=spec)
    for part in parts:
        check_part(part, len(part.rows), flag, required_columns)
    _note_unread(parts, flag, required_columns)
    kinds, usual = _find_kinds(parts, required_columns), {}
    if bad_rows == "error":
        _check_one_type(kinds)
    else:
        usual = {column: max(found, key=lambda kind: found[kind][1]) for _, column, found in kinds if found}
    mixed = np.concatenate(items) if probs is None else interleaved(items, probs, flag, seed)
    return Rows(parts, mixed[:max_samples], usual, convert)


def _note_unread(parts: Sequence[Part], flag: str, required: Mapping[str, str | None]) -> None:
    """Prints the columns that no flag names, such as a second half of the question."""
    read = {*required.values(), *IMPLICIT}
    unread = dict.fromkeys(column for part in parts for column in part.columns if column not in read)
    if required and unread:
        notify_once(f"note: {flag}: columns that no flag names, and that are not read: {', '.join(unread)}")


IMPLICIT = ("tools", "datasource")
"""Columns that are read without a flag."""
MAY_LACK = ("--data.image_key", "--data.tools_key")
"""Flags of columns that many of the rows may lack."""


def check_columns(
    spec: str,
    *,
    flag: str,
    required_columns: Mapping[str, str | None],
    split: str = "train",
    bad_rows: BadRows = "error",
    row_func: str | None = None,
) -> None:
    """Raises what `load_rows` would raise for missing files, splits and columns, reading only the first rows
    or the schema of each file (a .json list is read whole, and a file whose first rows lack what `MAY_LACK`
    names). Names on the hub are not looked up; URLs are fetched. With `row_func` the columns are those of the
    first row that it returns."""
    convert, optional = row_function(row_func), {required_columns.get(key) for key in MAY_LACK} - {None}

    def read(file: File) -> Part:
        part = peek(file, bad_rows)
        return part if convert or optional <= {*part.columns} else READERS[file.path.suffix](file, bad_rows)

    for part in heads(spec, flag, split, read):
        check_part(part, len(part.columns), flag, {} if convert else required_columns)
        if convert and bad_rows == "error" and (made := _first_made(part, convert, flag)):
            check_part(Part.of(f"a row of {row_func}", [made]), 1, flag, required_columns)


def _first_made(part: Part, convert: RowFunction, flag: str) -> Row | None:
    for i, row in enumerate(islice(cast(Iterable[Row], part.rows), 100)):
        try:
            return convert(row)
        except LeftOut:
            continue
        except BadRow as reason:
            text = f"{reason.text}\n{REMEDY}"
            raise UsageError(reason.code, text, flag=flag, value=part.name, row=part.number(i)) from reason
    return None


def heads(spec: str, flag: str, split: str, read: Callable[[File], Part]) -> Iterator[Part]:
    """Yields what `read` returns for each file that `spec` names. Names on the hub are left out."""
    for item in split_spec(spec):
        if is_gym(item):
            gym_dataset(item, flag)
            yield Part(name=item, rows=[dict.fromkeys(COLUMNS, "")], columns=COLUMNS)
            continue
        for file in _list_files(item, split, flag) or ():
            yield _read_saved(file, split) if file.path.is_dir() else read(file)


def rows_digest(spec: str, *, flag: str, split: str = "train") -> str:
    """Returns a digest of everything that `load_rows` would read: equal for equal files, wherever they are. A
    hub dataset contributes its fingerprint."""
    found: list[object] = []
    for item in split_spec(spec):
        if is_gym(item):
            found.append((item, version("reasoning_gym")))
            continue
        files = _list_files(item, split, flag, look_up=True)
        if files is None:
            found.append((item, cast(datasets.Dataset, _read_hub(item, split, flag).rows)._fingerprint))
            continue
        for place in (file.path for file in files if file.path.is_dir()):
            saved = sorted(path for path in place.rglob("*") if path.is_file())
            found.append([(str(path.relative_to(place)), file_digest(path)) for path in saved])
        found.append([(file.path.suffix, file_digest(file.path)) for file in files if file.path.is_file()])
    return digest(found)


def _load(item: str, split: str, flag: str, bad_rows: BadRows) -> list[Part]:
    if is_gym(item):
        size = gym_dataset(item, flag).size
        return [Part.of(item, list(tracked(gym_rows(item, flag), size, f"making {item}")))]
    files = _list_files(item, split, flag, look_up=True)
    if files is None:
        return [_read_hub(item, split, flag)]
    return [read_file(file, split, bad_rows) for file in files]


def _given(rows: Any, split: str, flag: str) -> Part:
    """Returns rows that are in memory: of `datasets` or a DataFrame of pandas, or a list of dicts. Raises
    UsageError for other values."""
    if isinstance(rows, pd.DataFrame):
        rows = datasets.Dataset.from_pandas(rows, preserve_index=False)
    if isinstance(rows, datasets.Dataset | datasets.DatasetDict):
        return _of_split(rows, split, flag, flag)
    if not isinstance(rows, Sequence):
        text = "expects a path, a list of rows, a datasets.Dataset or a pandas.DataFrame; "
        text += f"this is a {type(rows).__name__}"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag=flag)
    for i, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            text = f"a row is a dict from columns to values; this is a {type(row).__name__}"
            raise UsageError(ErrorCode.INVALID_ROW, text, flag=flag, row=i)
    return Part.of(flag, rows)


def read_file(file: File, split: str, bad_rows: BadRows) -> Part:
    return _read_saved(file, split) if file.path.is_dir() else READERS[file.path.suffix](file, bad_rows)


def _list_files(item: str, split: str, flag: str, *, look_up: bool = False) -> list[File] | None:
    """Lists the files to read for an item, unpacked, or the folder of one saved dataset. None for a name on
    Hugging Face's hub. Files of a name on ModelScope are fetched with `look_up`; without, None."""
    files = named_files(item, split, flag, look_up=look_up)
    return None if files is None else [unpacked(file) for file in files]


def named_files(item: str, split: str, flag: str, *, look_up: bool) -> list[File] | None:
    if is_url(item):
        return fetched(item, flag, partial(_select_split, place=item, split=split, flag=flag))
    place = _find(item, flag)
    if place and re.search(r"[\[+]", split):
        text = f"has no split {split!r}: only names on the hub have slices and sums of splits.\n"
        text += "The first N rows are read with the flag of max_samples N."
        raise UsageError(ErrorCode.NOT_FOUND, text, flag=flag, value=place)
    if place is None and uses_modelscope() and look_up:
        name, _, data_dir = item.partition("@")
        place = dataset_folder(name) / data_dir
    if place is None:
        return None
    files = [place]
    if place.is_dir() and not is_saved_dataset(path.name for path in place.glob("*")):
        try:
            names = sorted(str(path.relative_to(place)) for path in _files_within(place))
        except OSError as error:
            text = f"the folder cannot be read: {error}.\nName a folder that contains only the data set."
            raise UsageError(ErrorCode.UNREADABLE, text, flag=flag, value=place) from error
        files = [place / name for name in _select_split(names, place=place, split=split, flag=flag)]
    if lost := next((file for file in files if not file.exists()), None):
        text = f"a link to {os.readlink(lost)}, which does not exist. Remove the link, or mend it."
        raise UsageError(ErrorCode.NOT_FOUND, text, flag=flag, value=lost)
    return [File(path, str(path), flag) for path in files]


def _files_within(place: Path) -> Iterator[Path]:
    """Yields the files of a folder and of those in it, also of linked ones, and links to nothing. No folder
    is read twice."""
    read: set[str] = set()
    for folder, folders, names in os.walk(place, onerror=_fail, followlinks=True):
        if os.path.realpath(folder) in read:  # a link to a folder that holds it
            folders.clear()
            continue
        read.add(os.path.realpath(folder))
        paths = (Path(folder, name) for name in names)
        yield from (path for path in paths if path.is_file() or not path.exists())


def _fail(error: OSError) -> NoReturn:
    raise error


def _select_split(names: Sequence[str], *, place: str | Path, split: str, flag: str) -> list[str]:
    """Returns the row files in `place` whose names have `split`; if no name has a split, all row files."""
    files = [name for name in names if has_rows(name) and not _is_left_out(name)]
    if not files:
        text = f"the folder has no {', '.join(READERS)} file, compressed (.gz) or not."
        raise UsageError(ErrorCode.NOT_FOUND, text, flag=flag, value=place)
    splits = {name: _split_in_name(name, split) for name in files}
    if any(splits.values()):
        if split not in splits.values():
            raise _no_split(place, split, {name for name in splits.values() if name}, flag)
        if others := [name for name in files if splits[name] is None]:
            text = f"{counted(len(others), 'file')} not read, because other names have a split: {others[0]}"
            notify_once(f"note: {flag} {place}: {text}")
        files = [name for name in files if splits[name] == split]
    _note_missing(files, f"{flag} {place}")
    if twice := sorted({f"{name}{PACKED}" for name in files}.intersection(files)):
        known = twice[0].removesuffix(PACKED)
        notify_once(f"note: {flag} {place}: {', '.join(twice)}: not read, because {known} is there, unpacked")
    return [name for name in files if name not in twice]


def _note_missing(names: Sequence[str], place: str) -> None:
    """Prints a note if names such as train-00000-of-00002.parquet count files that are not there."""
    found = Counter(match.group(1, 2) for name in names if (match := _NUMBERED.match(name)))
    for (stem, count), number in found.items():
        if number < int(count):
            notify_once(f"note: {place}: {number} of the {int(count)} files of {stem} are there and read")


_NUMBERED = re.compile(r"(.*)-\d{5}-of-(\d{5})")


def _is_left_out(name: str) -> bool:
    """Tells whether `datasets` skips a file of a folder: hidden, in a hidden or __ folder, or metadata."""
    *folders, file = PurePath(name).parts
    is_special = any(folder.startswith((".", "__")) for folder in folders)
    return is_special or file.startswith(".") or file in FILES_TO_IGNORE


def _find(item: str, flag: str) -> Path | None:
    """Returns the file or folder that `item` names; None when it can only be a name on the hub."""
    place = base = Path(item).expanduser()
    if not os.path.exists(place) and "@" in item:
        path, _, data_dir = item.rpartition("@")
        base = Path(path).expanduser()
        place = base / data_dir
    error = partial(UsageError, flag=flag, value=item)
    if base.suffix == ".py":
        raise error(
            ErrorCode.UNSUPPORTED,
            "loading scripts are not run, because `datasets` does not support them.\n"
            "Write the rows to a .jsonl or .parquet file, and name that file.",
        )
    if os.path.isfile(place) and not has_rows(place):
        raise error(ErrorCode.UNSUPPORTED, f"a file must end in {ENDINGS}.")
    if os.path.exists(place) and not os.path.isfile(place) and not os.path.isdir(place):
        raise error(ErrorCode.UNSUPPORTED, "neither a file nor a folder, but a device, a pipe or a socket.")
    if os.path.exists(place):
        return place
    if has_rows(place) or item.startswith((".", "/", "~")) or os.path.exists(base):
        raise error(ErrorCode.NOT_FOUND, missing(str(place), item))
    return None


def _read_hub(item: str, split: str, flag: str) -> Part:
    name, _, data_dir = item.partition("@")
    try:
        return Part.from_table(item, datasets.load_dataset(name, data_dir=data_dir or None, split=split))
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        text = f"not found on the hub: {first_line(error)}\nAs a path it {missing(name, name)}."
        raise UsageError(ErrorCode.NOT_FOUND, text, flag=flag, value=item) from error


def _read_saved(folder: File, split: str) -> Part:
    """Reads a folder that `save_to_disk` wrote, memory-mapped."""
    try:
        saved = datasets.load_from_disk(str(folder.path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"a damaged folder of `save_to_disk`: {first_line(error)}\nSave the dataset again."
        raise folder.error(ErrorCode.UNREADABLE, text) from error
    return _of_split(saved, split, folder.name, folder.flag)


def _of_split(rows: datasets.Dataset | datasets.DatasetDict, split: str, name: str, flag: str) -> Part:
    if isinstance(rows, datasets.Dataset):
        return Part.from_table(name, rows)
    if split not in rows:
        raise _no_split(name, split, map(str, rows), flag)
    return Part.from_table(f"{name}/{split}", rows[split])


def _no_split(place: object, split: str, splits: Iterable[str], flag: str) -> UsageError:
    text = f"has no split {split!r}. Its splits: {', '.join(sorted(splits))}"
    return UsageError(ErrorCode.NOT_FOUND, text, flag=flag, value=place)


def _split_in_name(name: str, wanted: str) -> str | None:
    splits = "|".join(map(re.escape, (wanted, *_SPLIT_WORDS)))
    found = re.search(rf"(?<![a-z0-9])({splits})(?![a-z0-9])", name, re.IGNORECASE)
    return wanted if found and found[1].lower() == wanted.lower() else found and found[1].lower()


_SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def check_part(part: Part, size: int, flag: str, required: Mapping[str, str | None]) -> None:
    """Raises UsageError if the part, named by `flag`, is empty or lacks a column. size: its number of rows
    or of columns."""
    if not size:
        raise UsageError(ErrorCode.UNREADABLE, "has no rows: it is empty.", flag=flag, value=part.name)
    for column_flag, column in required.items():
        if column is not None and column not in part.columns:
            near = difflib.get_close_matches(column, part.columns, n=1)
            text = f"{part.name} has no such column.\nIts columns: {', '.join(part.columns)}"
            text += f"\nDid you mean {near[0]}?" if near else ""
            raise UsageError(ErrorCode.MISSING_COLUMN, text, flag=column_flag, value=column)


Found = dict[str, tuple[str, int]]
"""Kind of value -> (place of the first one, number of rows)."""


def _find_kinds(parts: Sequence[Part], required: Mapping[str, str | None]) -> list[tuple[str, str, Found]]:
    """Returns (flag, column, its kinds in the order of occurrence) for each required column."""
    kinds = []
    for flag, column in required.items():
        if column is None:
            continue
        found: Found = {}
        for part in parts:
            for kind, (first, count) in part.find_kinds(column).items():
                origin, before = found.get(kind, (f"{part.name}:{part.number(first)}", 0))
                found[kind] = origin, before + count
        kinds.append((flag, column, found))
    return kinds


def _check_one_type(kinds: Iterable[tuple[str, str, Found]]) -> None:
    for flag, column, found in kinds:
        if len(found) > 1:
            (first, (origin, _)), (other, (there, _)) = [*found.items()][:2]
            raise UsageError(
                ErrorCode.INVALID_ROW,
                f"{other} at {there}, but {first} at {origin}.\n"
                f"Give the column one type; values are never converted. {REMEDY}",
                flag=flag,
                value=column,
            )


def whole_part(part: int, rows: int) -> np.ndarray:
    """Returns the (rows, 2) index of one whole part."""
    return np.stack([np.full(rows, part), np.arange(rows)], axis=1)


def interleaved(items: Sequence[np.ndarray], probs: str, flag: str, seed: int) -> np.ndarray:
    values = parse_probabilities(probs, len(items), flag.removeprefix("--"))
    tables = [datasets.Dataset.from_dict({"part": item[:, 0], "row": item[:, 1]}) for item in items]
    mixed = datasets.interleave_datasets(
        tables, probabilities=values, seed=seed, stopping_strategy="all_exhausted"
    )
    return np.stack([np.asarray(mixed["part"]), np.asarray(mixed["row"])], axis=1)
