"""Explains an error by its code, its name or its text (`openrlhf explain`)."""

import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from itertools import starmap
from pathlib import Path

from openrlhf.api import ErrorCode, UsageError
from openrlhf.tools.doctor.codes import CODES, meanings
from openrlhf.tools.doctor.messages import MESSAGES, find_messages

LONGEST = 4 << 20
"""Bytes at the end of a log that are read."""
WIDEST = 100
"""Columns of the longest line, however wide the terminal is."""
STDIN = "-"


def explain(words: list[str]) -> int:
    """Prints the meaning, the causes and the remedy of an error. `words`: a code, a name of this list, the
    text of an error, the path of a log, or "-" for stdin; none: the list. Raises UsageError if nothing is
    known of it."""
    text = " ".join(words)
    texts = [*_explained(_read(text))] if text else [_list()]
    if not texts:
        known = [*CODES, *(name for _, name in MESSAGES)]
        names = difflib.get_close_matches(text, known, n=3, cutoff=0.5)
        near = f"did you mean {' or '.join(names)}?" if names else "`openrlhf explain` lists what is known."
        raise UsageError(
            ErrorCode.NOT_FOUND,
            f"neither a code, a name nor a known message; {near}",
            flag="openrlhf explain",
            value=repr(text),
        )
    print("\n\n".join(texts))
    return 0


def _read(text: str) -> str:
    """Returns the end of the file that `text` names, or else `text` itself."""
    if text == STDIN:
        return sys.stdin.read()
    try:
        with open(text, "rb") as file:
            file.seek(max(0, Path(text).stat().st_size - LONGEST))
            return file.read().decode(errors="replace")
    except (OSError, ValueError):  # a text that is no path
        return text


def _explained(text: str) -> Iterator[str]:
    """Yields the explanations of all that is known in a text: our codes first."""
    name = text.strip().strip("[]")
    codes = [name] if name in CODES else re.findall(r"\[([a-z-]+)\]\s*$", text, re.MULTILINE)
    yield from (_of_code(ErrorCode(code)) for code in dict.fromkeys(codes) if code in CODES)
    named = [key for key in MESSAGES if key[1] == name]
    yield from starmap(_of_message, named or find_messages(text))


def _of_code(code: ErrorCode) -> str:
    about, title = CODES[code], f"{code}: {meanings()[code]}"
    return _explanation(title, causes=about.causes, remedy=about.remedy, example=about.example)


def _of_message(source: str, name: str) -> str:
    about, title = MESSAGES[source, name], f"{name}: an error of {source}"
    return _explanation(title, text=about.sample, meaning=about.meaning, remedy=about.remedy)


def _explanation(title: str, **parts: str) -> str:
    return "\n\n".join([title, *(_part(name, text) for name, text in parts.items())])


def _part(title: str, text: str) -> str:
    """Returns a text beside its title, in lines that fit the terminal."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    room = {"initial_indent": f"  {title:<9}", "subsequent_indent": " " * 11, "width": width}
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, break_long_words=False, break_on_hyphens=False, **room)
        room["initial_indent"] = room["subsequent_indent"]
    return "\n".join(lines)


def _list() -> str:
    width = min(WIDEST, shutil.get_terminal_size().columns) - 29
    line = lambda name, text: f"  {name:<26} {textwrap.shorten(text, width, placeholder=' ...')}"
    codes = [line(*meaning) for meaning in meanings().items()]
    messages = [line(name, message.meaning) for (_, name), message in MESSAGES.items()]
    return "\n".join(["codes of openrlhf", *codes, "", "errors of libraries and of the system", *messages])
