"""Refusals as tests look at them: the code, the flag, the value and the row. Their prose may change."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from openrlhf.errors import CodedError, ErrorCode

_LINE = re.compile(r"error: (?P<text>.*?) \[(?P<code>[a-z-]+)\]$")


class Refusal(NamedTuple):
    """An error as a command prints it."""

    code: ErrorCode
    place: str
    """Flag and value, or file and row, up to the first colon with a space behind it."""
    text: str
    """Description and remedy, all lines of it."""


def printed(stderr: str) -> list[Refusal]:
    """Returns the errors with a code among the lines of stderr, in order."""
    found: list[Refusal] = []
    for line in stderr.splitlines():
        if match := _LINE.match(line):
            place, _, text = match["text"].partition(": ")
            found.append(Refusal(ErrorCode(match["code"]), place, text))
        elif found and not line.startswith(("error: ", "note: ", "`openrlhf explain ")):
            found[-1] = found[-1]._replace(text=f"{found[-1].text}\n{line}")
    return found


_CHANGE = re.compile(r"(?P<name>\S+) was (?P<before>.*?), is (?P<now>.*?)(?:: |$)", re.MULTILINE)


class Changed(NamedTuple):
    """A setting that a resumed run has changed, as a message lists it."""

    name: str
    """The flag with its dashes, or the name of other content."""
    before: str
    now: str


def changes(text: str) -> list[Changed]:
    """Returns the changed settings that a message lists, in order."""
    return [Changed(**match.groupdict()) for match in _CHANGE.finditer(text)]


@contextmanager
def refused(
    code: ErrorCode, *, told: str | tuple[str, ...] = (), **expected: object
) -> Iterator[pytest.ExceptionInfo[CodedError]]:
    """Expects an error of this code inside, whose text holds what is `told`, and whose `flag`, `value` and
    `row` are those of `expected`."""
    with pytest.raises(CodedError) as raised:
        yield raised
    error = raised.value
    found = {name: getattr(error, name) for name in expected}
    wanted = {name: str(value) if name == "value" else value for name, value in expected.items()}
    assert (error.code, found) == (code, wanted), f"[{error.code}] {error}"
    assert [words for words in ((told,) if isinstance(told, str) else told) if words not in error.text] == []


_BROKEN = re.compile(
    r"step \d+: .+, and must be .+\.\n[^\n]+ [^\n]+\.\n"
    r"This is a bug .* report it .* OPENRLHF_SELFTEST=0 .* --train\.verify_steps 0 .*\."
)


@contextmanager
def broken() -> Iterator[pytest.ExceptionInfo[CodedError]]:
    """Expects the error of a quantity of a step that has another value than it must have: its causes, whose
    bug it is, and how the check is switched off."""
    with refused(ErrorCode.BROKEN_INVARIANT) as raised:
        yield raised
    assert _BROKEN.fullmatch(raised.value.text), raised.value.text
