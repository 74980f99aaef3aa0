"""What happens to a row that cannot be used: it stops the run, or it is skipped and counted; never
repaired."""

import logging
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from openrlhf.datasets.sources import Row, Rows, kind

ReadT = TypeVar("ReadT")
Policy = Literal["error", "skip"]

logger = logging.getLogger(__name__)


class BadRow(Exception):
    """Why a row cannot be used. Becomes a ValueError or a count, never seen outside `openrlhf.datasets`."""


def read_rows(rows: Rows, read: Callable[[Row], ReadT], policy: Policy) -> tuple[dict[int, ReadT], int]:
    """Row number -> what `read` makes of the row, and how many rows were skipped.

    "error": the first row for which `read` raises BadRow is a ValueError with its file and line.
    "skip": such rows are left out and counted; the first is logged.
    """
    kept: dict[int, ReadT] = {}
    skipped = 0
    for i, row in enumerate(rows):
        try:
            kept[i] = read(row)
        except BadRow as reason:
            if policy == "error":
                raise bad_row_error(rows.origin(i), reason) from reason
            if not skipped:
                logger.warning("%s: skipped: %s", rows.origin(i), reason)
            skipped += 1
    return kept, skipped


def bad_row_error(origin: str, reason: object) -> ValueError:
    return ValueError(f"{origin}: {reason}\nMend the row, or leave such rows out with --data.bad_rows skip.")


def value_of(row: Row, column: str, *types: type) -> Any:
    """The value of a column, which must be there and be of one of the types."""
    if row.get(column) is None:
        raise BadRow(f"column {column!r} is {'null' if column in row else 'missing'}.")
    value = row[column]
    if types and not isinstance(value, types):
        wanted = " or ".join(kind(of()) for of in types)
        raise BadRow(f"column {column!r} is {kind(value)}, not {wanted}.")
    if isinstance(value, float) and math.isnan(value):
        raise BadRow(f"column {column!r} is NaN.")
    return value
