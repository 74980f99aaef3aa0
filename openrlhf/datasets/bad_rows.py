"""What happens to a row that cannot be used: it stops the run, or it is skipped and counted; never
repaired."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from openrlhf.datasets.files import Row, kind
from openrlhf.datasets.sources import Rows
from openrlhf.observe.tracked import tracked

ReadT = TypeVar("ReadT")
Policy = Literal["error", "skip"]

logger = logging.getLogger(__name__)


class BadRow(Exception):
    """Why a row cannot be used. Becomes a ValueError or a count, never seen outside `openrlhf.datasets`."""


def read_rows(rows: Rows, read: Callable[[Row], ReadT], policy: Policy) -> tuple[dict[int, ReadT], int]:
    """Row number -> what `read` makes of the row, and how many rows were skipped; see `read_each`."""
    dropped: Counter[str] = Counter()
    return dict(read_each(rows, read, policy, dropped)), dropped.total()


def read_each(
    rows: Rows, read: Callable[[Row], ReadT], policy: Policy, dropped: Counter[str]
) -> Iterator[tuple[int, ReadT]]:
    """Row number, and what `read` makes of the row, one after the other.

    "error": the first row for which `read` raises BadRow is a ValueError with its file and line.
    "skip": such rows are left out and counted in `dropped`; the first is logged.
    """
    for i, row in enumerate(tracked(rows, len(rows), "reading rows")):
        try:
            value = read(row)
        except BadRow as reason:
            if policy == "error":
                raise bad_row_error(rows.origin(i), reason) from reason
            if not dropped[BAD_ROW]:
                logger.warning("%s: skipped: %s", rows.origin(i), reason)
            dropped[BAD_ROW] += 1
        else:
            yield i, value


BAD_ROW = "bad row"
"""Why such rows are dropped."""


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
