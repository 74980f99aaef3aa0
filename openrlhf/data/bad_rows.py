"""Handles unusable rows: such a row stops the run, or is skipped and counted; it is never repaired."""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeVar

from openrlhf.data.files import MAX_TEXT, REMEDY, BadRow, Row, kind
from openrlhf.data.row_func import LEFT_OUT, LeftOut
from openrlhf.data.sources import Rows
from openrlhf.errors import UsageError
from openrlhf.observability.waits import tracked

ReadT = TypeVar("ReadT")
BadRowAction = Literal["error", "skip"]

logger = logging.getLogger(__name__)


def read_each(
    rows: Rows, read: Callable[[Row], ReadT], policy: BadRowAction, skipped: Counter[str]
) -> Iterator[tuple[int, ReadT]]:
    """Yields the row number and the result of `read` for each usable row, in order.

    "error": the first row for which `read` raises BadRow is a UsageError with its file and line.
    "skip": such rows are left out and counted in `skipped`, as are unreadable rows and rows with a value of
    another kind than the column has in most rows; the first few are logged.
    """
    for i in tracked(range(len(rows)), len(rows), "reading rows"):
        try:
            row = rows[i]
            _check_kinds(row, rows.kinds)
            value = read(row)
        except BadRow as reason:
            refuse(rows, i, reason, policy, skipped)
        else:
            yield i, value


def refuse(rows: Rows, i: int, reason: BadRow, policy: BadRowAction, skipped: Counter[str]) -> None:
    """Raises UsageError for row i under "error"; under "skip" counts the row in `skipped` and logs the first
    few. A row that a user's function leaves out is only counted."""
    if isinstance(reason, LeftOut):
        skipped[LEFT_OUT] += 1
        return
    if policy == "error":
        raise at_row(rows, i, reason) from reason
    skipped[BAD_ROW] += 1
    if skipped[BAD_ROW] <= NAMED:
        logger.warning("%s: skipped: %s", rows.origin(i), reason.text)


def at_row(rows: Rows, i: int, reason: BadRow) -> UsageError:
    """Returns the reason as an error with the file and the line of row i."""
    name, number = rows.place(i)
    return UsageError(reason.code, f"{reason.text}\n{REMEDY}", value=name, row=number)


def check_embedded(token_ids: Iterable[int], missing: Mapping[int, str]) -> None:
    """Raises BadRow for a token without an embedding. `missing`: those of the model, see
    `missing_embeddings`."""
    if found := missing.keys() & set(token_ids) if missing else ():
        raise BadRow(f"it has the token {missing[min(found)]!r}, without an embedding in the model: {RESIZE}")


RESIZE = "resize the model's embedding (resize_token_embeddings in transformers), or leave the token out."

NAMED = 3
"""Number of skipped rows that are logged one by one."""

BAD_ROW = "bad row"
"""Reason under which unusable rows are counted in `skipped`."""


def _check_kinds(row: Row, kinds: Mapping[str, str]) -> None:
    for column, usual in kinds.items():
        if row.get(column) is not None and kind(row[column]) != usual:
            raise BadRow(f"column {column!r} is {kind(row[column])}; in most rows it is {usual}.")


def read_number(row: Row, column: str) -> Any:
    """Returns a value. A text that is a number, true or false becomes it, as CSV has texts alone."""
    value = read_value(row, column)
    with suppress(ValueError):
        return json.loads(value.lower()) if isinstance(value, str) else value
    return value


def read_value(row: Row, column: str, *types: type) -> Any:
    """Returns the value of a column. Raises BadRow if it is missing, null, NaN or of another type."""
    if row.get(column) is None:
        raise BadRow(f"column {column!r} is {'null' if column in row else 'missing'}.")
    value = row[column]
    if types and not isinstance(value, types):
        wanted = " or ".join(kind(of()) for of in types)
        raise BadRow(f"column {column!r} is {kind(value)}, not {wanted}.")
    if types and isinstance(value, str) and len(value) > MAX_TEXT:
        raise BadRow(f"column {column!r} has {len(value)} characters; at most {MAX_TEXT} can be tokenised.")
    if isinstance(value, float) and math.isnan(value):
        raise BadRow(f"column {column!r} is NaN.")
    return value
