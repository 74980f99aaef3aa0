"""Tells the number of rows that a data flag names, and the first of them, without loading all."""

from itertools import islice
from typing import cast

import numpy as np
import pyarrow.parquet as pq

from openrlhf.config.checks import split_spec
from openrlhf.config.reasoning_gym import is_gym
from openrlhf.data.files import READERS, File, Row, peek
from openrlhf.data.gzipped import unpacked
from openrlhf.data.sources import check_part, heads, interleaved, named_files, read_file, whole_part


def count_rows(
    spec: str, *, flag: str, probs: str | None, split: str, max_samples: int, seed: int
) -> int | None:
    """Counts the rows that `load_rows` returns. Returns None where that takes long: for URLs, names on the
    hub and files of more than `COUNTED` bytes that must be parsed."""
    items: list[np.ndarray] = []
    for item in split_spec(spec):
        files = None if "://" in item or is_gym(item) else named_files(item, split, flag, look_up=False)
        counts = [_num_rows(file, split, max_samples) for file in files or ()]
        if not counts or None in counts:
            return None
        items.append(whole_part(len(items), min(max_samples, sum(filter(None, counts)))))
    mixed = sum(map(len, items)) if probs is None else len(interleaved(items, probs, flag, seed))
    return min(mixed, max_samples)


def _num_rows(file: File, split: str, most: int) -> int | None:
    path, ending = file.path, file.path.suffix
    if ending == ".parquet":
        return pq.read_metadata(path).num_rows
    if ending == ".jsonl":
        with path.open("rb") as lines:
            return sum(1 for _ in islice(filter(bytes.strip, lines), most))
    is_cheap = path.is_dir() or ending == ".arrow" or path.stat().st_size <= COUNTED
    return len(read_file(unpacked(file), split, "skip").rows) if is_cheap else None


COUNTED = 2**28
"""Bytes of a file up to which it is parsed only to count its rows."""


def first_row(spec: str, *, flag: str, split: str = "train") -> Row | None:
    """Returns the first row that `spec` names; None for a name on the hub. Raises like `check_columns`."""
    read = lambda file: (READERS[".parquet"] if file.path.suffix == ".parquet" else peek)(file, "error")
    for part in heads(spec, flag, split, read):
        check_part(part, len(part.rows), flag, {})
        return cast(Row, part.rows[0])
    return None
