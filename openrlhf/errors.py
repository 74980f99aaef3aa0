"""Errors for users: their codes, their form, and how a command ends on one or on a signal.

`OPENRLHF_DEBUG=1` shows the whole traceback.
"""

import io
import logging
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from types import FrameType
from typing import Any

EXIT_USAGE = 2
EXIT_FAILURE = 1

PATIENCE = 5.0
"""Seconds that ranks other than 0 wait before they print an error. By then rank 0 has usually printed the
same one and the launcher has stopped them."""
GRACE = 20.0
"""Seconds after a signal until the process exits by force. If the signal also ended Ray's servers, calls to
them never return."""


class ErrorCode(StrEnum):
    """Kinds of errors that a user can act on. Each is printed behind the error's first line, and
    docs/errors.md lists the usual causes and remedies of each."""

    UNKNOWN_FLAG = "unknown-flag"
    """No flag, option or command has this name."""
    INVALID_VALUE = "invalid-value"
    """The value of a flag, of an option or of a variable has a wrong type, form or range."""
    MISSING_FLAG = "missing-flag"
    """A required flag is not set."""
    CONFLICT = "conflict"
    """Two settings contradict each other, or one needs another."""
    UNSUPPORTED = "unsupported"
    """No implementation exists for this model, engine, backend or combination."""
    MISSING_PACKAGE = "missing-package"
    """An optional package is not installed, or has the wrong version."""
    NOT_FOUND = "not-found"
    """A file, a folder, a model or a URL does not exist."""
    UNREADABLE = "unreadable"
    """A file or a URL exists, and its content is damaged, empty, of another format or cannot be fetched."""
    NOT_WRITABLE = "not-writable"
    """A place that the run writes to refuses it: permissions, space, or a finished result that it would
    replace."""
    MISSING_COLUMN = "missing-column"
    """A dataset has no column of this name."""
    INVALID_ROW = "invalid-row"
    """A row of a dataset has a wrong type or content."""
    NO_ROWS = "no-rows"
    """Every row of a dataset was skipped."""
    TOO_LONG = "too-long"
    """A sequence does not fit a length: of a flag or of the model."""
    CHAT_TEMPLATE = "chat-template"
    """A chat template does not fit the messages or the agent."""
    INVALID_MODEL = "invalid-model"
    """A folder holds no model or tokenizer of the expected kind, or two models do not belong together."""
    USER_CODE = "user-code"
    """A user's reward function, agent, environment, algorithm or tracker cannot be imported, or breaks its
    contract."""
    RESOURCES = "resources"
    """The machine or the cluster has too few GPUs, too little memory or too few ranks."""
    CLUSTER = "cluster"
    """Ray, a port or a node of the cluster cannot be used."""
    IN_USE = "in-use"
    """Another living process owns a folder."""
    OTHER_RUN = "other-run"
    """A checkpoint or a result belongs to a run with other settings, data or code."""
    DAMAGED_CHECKPOINT = "damaged-checkpoint"
    """A checkpoint is incomplete, or differs from what was saved."""
    REWARDS_FAILED = "rewards-failed"
    """Too many rewards of a step failed, or a reward source does not answer."""
    EPISODES_FAILED = "episodes-failed"
    """Too many episodes of a step failed, or too few samples are left of one."""
    BROKEN_INVARIANT = "broken-invariant"
    """A quantity of a step, which has the same value for every model and data set, has another one."""
    NOT_FINITE = "not-finite"
    """A loss, a gradient or a weight is NaN or infinite."""
    ENGINE_FAILED = "engine-failed"
    """A rollout engine did not start, failed or died."""
    WORKER_FAILED = "worker-failed"
    """A training rank failed, died or stopped answering."""
    WRONG_WEIGHTS = "wrong-weights"
    """After a weight sync or a load, a model's outputs differ from those of the model that it should
    equal."""


REDACTED = "<redacted>"
# The bounds keep the search linear in long texts without a URL.
_URL = re.compile(r"\w{1,20}://[^\s\"']+")
# In s3://bucket@folder the bucket is no user.
_USER = re.compile(r"(?i)((?:https?|ftp)://|://(?=[^/?#@]*:))[^/?#]+(?=@)")
_KEY = r"(?i)([?&;#][\w.-]{0,64}(key|token|sig|secret|pass|pwd|credential|auth)[\w.-]{0,64}=)"
_PARAMETER = re.compile(_KEY + r"[^&#,]+?(?=:?$|[&#,])")


def without_secrets(text: str) -> str:
    """Replaces the user and password of every URL in `text`, and its parameters that are named like keys."""
    hidden = lambda url: _PARAMETER.sub(rf"\1{REDACTED}", _USER.sub(rf"\1{REDACTED}", url[0]))
    return _URL.sub(hidden, text)


class CodedError(Exception):
    """An error that a user can act on. `str()` returns `FLAG VALUE:ROW: TEXT`; parts that are not set are
    omitted."""

    def __init__(
        self, code: ErrorCode, text: str, *, flag: str = "", value: object = "", row: int | None = None
    ) -> None:
        """`text`: description and remedy; `flag`: the flag with its dashes; `value`: its value or the file;
        `row`: number of the row or line in the file."""
        text = without_secrets(text)
        super().__init__(code, text)  # the arguments with which pickle calls __init__; attributes follow
        self.code = code
        self.text = text
        self.flag = flag
        self.value = without_secrets(str(value))
        self.row = row

    def __str__(self) -> str:
        place = " ".join(part for part in (self.flag, shortened(self.value, LONGEST_VALUE)) if part)
        place += "" if self.row is None else f":{self.row}"
        return f"{place}: {self.text}" if place else self.text


class UsageError(CodedError, ValueError):
    """Raised for flags, files and models that cannot be used. The command exits with status 2."""


class RunError(CodedError, RuntimeError):
    """Raised for a failure during a run. The command exits with status 1."""


def as_one(problems: Sequence[UsageError]) -> UsageError:
    """Returns the first of several problems, with the messages of the others appended to its text."""
    first, *others = problems
    first.text = "\n".join([first.text, *map(str, others)])
    return first


LONGEST_VALUE, LONGEST_LINE = 300, 3000
"""Characters of a value, and of a line of an error, that are printed."""


def shortened(text: str, longest: int) -> str:
    """Returns at most about `longest` characters of `text`: its beginning, its end, and its length."""
    if len(text) <= longest:
        return text
    return f"{text[: longest - 60]}…{text[-20:]} ({len(text):,} characters)"


def readable(text: str) -> str:
    """Returns `text` for a terminal: long lines shortened, control characters escaped."""
    lines = (shortened(line, LONGEST_LINE) for line in text.split("\n"))
    escaped = ("".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line) for line in lines)
    return "\n".join(escaped)


def describe(error: BaseException) -> str:
    """Returns an error's message, with its code in brackets behind the first line if it has one."""
    text = str(error)
    if not isinstance(error, CodedError):
        return text
    first, newline, rest = text.partition("\n")
    return f"{first} [{error.code}]{newline}{rest}"


SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a training command to stop."""
Handler = Callable[[int, FrameType | None], object] | int | None


class Stopped(KeyboardInterrupt):
    """Raised by Ctrl-C or SIGTERM in a training command. `code`: its exit status, 128 + signal number, or
    EXIT_STOPPED of openrlhf/stopping.py."""

    is_at_boundary = False
    """True if the run ended between two steps."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


def catch_signals() -> None:
    """Makes SIGINT and SIGTERM raise Stopped, once: later signals do not interrupt the shutdown."""
    catch(stop_at_once)


def catch(handler: Handler, numbers: Sequence[int] = SIGNALS) -> dict[int, Handler]:
    """Sets the handler of these signals. Returns the previous handlers."""
    return {number: signal.signal(number, handler) for number in numbers}


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """Handles a signal by raising Stopped."""
    raise shutting_down(Stopped(number))


def shutting_down(stopped: Stopped) -> Stopped:
    """Returns its argument. From here on signals are ignored, and the process ends within GRACE seconds."""
    catch(lambda number, frame: None)  # with SIG_IGN, Python warns about a pending signal
    timer = threading.Timer(GRACE, _force_exit, [stopped])
    timer.daemon = True
    timer.start()
    return stopped


def _force_exit(stopped: Stopped) -> None:
    _print_stopped(stopped)
    os._exit(stopped.code)


def _print_stopped(stopped: Stopped) -> None:
    if _rank() == 0:
        notes = " ".join(_notes(stopped))
        print(f"stopped {notes or 'before the first step'}", file=sys.stderr, flush=True)


@contextmanager
def noting_position(position: Callable[[bool], str]) -> Iterator[None]:
    """Adds the run's position to any error or stop inside, as a note. `position`: called with True for a stop
    between two steps, else with False."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        error.add_note(position(getattr(error, "is_at_boundary", False)))
        raise


@contextmanager
def short_errors() -> Iterator[None]:
    """Ends the process on an error raised inside. For error types written for users (CodedError, and plain
    ValueError, RuntimeError, FloatingPointError) it prints the message alone, for any other the traceback."""
    try:
        try:
            with while_read():
                yield
        except Exception as error:
            _exit_with(error)
    except KeyboardInterrupt as stop:
        if os.environ.get("OPENRLHF_DEBUG"):
            raise
        if isinstance(stop, Stopped):
            _print_stopped(stop)
        sys.exit(getattr(stop, "code", 128 + signal.SIGINT))


def print_all_characters() -> None:
    """Makes stdout escape characters that its encoding lacks. Else a sample's text could end a run."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def while_read() -> Iterator[None]:
    """Ends the process as SIGPIPE does once the reader of its output is gone (`| head`)."""
    print_all_characters()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        (output := select.poll()).register(1, 0)
        if not output.poll(0):  # another pipe broke
            raise
        if notes := _notes(error):
            print("stopped: the reader of the output is gone", *notes, file=sys.stderr, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush when the process exits
        sys.exit(128 + signal.SIGPIPE)


def _exit_with(error: Exception) -> None:
    cause = getattr(error, "cause", None) or error  # Ray wraps the worker's error
    plain = (ValueError, RuntimeError, FloatingPointError)
    is_for_users = isinstance(cause, CodedError) or type(cause) in plain
    if os.environ.get("OPENRLHF_DEBUG") or not is_for_users:
        raise error
    if _rank() > 0:
        time.sleep(PATIENCE)
    more = [f"`openrlhf explain {cause.code}` tells more."] if isinstance(cause, CodedError) else []
    lines = [f"error: {describe(cause)}", *_notes(error), *more]
    print(readable("\n".join(lines)), file=sys.stderr, flush=True)
    sys.exit(EXIT_USAGE if isinstance(cause, ValueError) else EXIT_FAILURE)


def _notes(error: BaseException | None) -> list[str]:
    """Returns the notes of an error. Without any, returns those of the nearest error in its `__context__`
    chain."""
    notes: list[str] = []
    while error is not None and not notes:
        notes, error = list(getattr(error, "__notes__", ())), error.__context__
    return notes


def counted(count: int, noun: str) -> str:
    """Formats a count for a message: 1 row, 1,024 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, and the next one behind a colon. The type stands for an
    empty message, and before a KeyError's, which is a value alone."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return f"KeyError: {text}" if isinstance(error, KeyError) else text


def is_first_of_machine() -> bool:
    """True on local rank 0, which prints for all processes of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def notify(text: str) -> None:
    """Prints a line on stderr, in the first process of each machine."""
    if is_first_of_machine():
        print(without_secrets(text), file=sys.stderr, flush=True)


@cache
def notify_once(text: str, about: Any = None) -> None:
    """Like `notify`, once for each text, and for each object that it is about."""
    notify(text)


@cache
def warn_once(logger: logging.Logger, text: str, about: Any = None) -> None:
    """Like `notify_once`, with a logger."""
    logger.warning(text)


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0
