"""Calls a user's function on each row of a dataset, which makes rows of any form readable."""

from collections.abc import Callable
from functools import partial
from typing import Any

from openrlhf.data.files import BadRow, Row, kind
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.plugins import load
from openrlhf.user_file import UnusableFile, line_and_error

FLAG = "--data.row_func"
LEFT_OUT = f"left out by {FLAG}"

RowFunction = Callable[[Row], Row]


class LeftOut(BadRow):
    """Raised for a row for which the function returned None. Such rows are skipped and counted."""

    def __init__(self) -> None:
        super().__init__(LEFT_OUT)
        self.args = ()  # pickle creates a copy without arguments


def row_function(reference: str | None) -> RowFunction | None:
    """Returns the function that `file.py:name` or `module:name` names; None without a reference. It maps a
    row to another, or to None to leave it out. Its calls raise BadRow, with the line in the file, where the
    function raises or returns anything else. Raises UsageError for a reference that cannot be used."""
    if reference is None:
        return None
    try:
        function = load(reference)
    except UnusableFile as error:
        raise UsageError(ErrorCode.USER_CODE, error.text, flag=FLAG, value=reference) from error
    if not callable(function):
        text = f"is {kind(function)}, not a function of a row."
        raise UsageError(ErrorCode.USER_CODE, text, flag=FLAG, value=reference)
    return partial(_converted, function=function, reference=reference)


def _converted(row: Row, *, function: Callable[[Row], Any], reference: str) -> Row:
    try:
        made = function(row)
    except Exception as error:
        text = f"{FLAG} {reference} failed: {line_and_error(error, reference)}."
        raise BadRow(text, ErrorCode.USER_CODE) from error
    if made is None:
        raise LeftOut
    if not isinstance(made, dict):
        text = f"{FLAG} {reference} returned {kind(made)}, not a row (an object) or None."
        raise BadRow(text, ErrorCode.USER_CODE)
    return made
