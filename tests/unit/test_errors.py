"""Errors for users: their form and their code, both of which survive the transfer between processes."""

import os
import pickle
import subprocess
import sys
import time

import pytest
from refusals import printed, refused

from openrlhf.agents.sandbox import SandboxUnavailable
from openrlhf.errors import (
    ErrorCode,
    RunError,
    UsageError,
    counted,
    describe,
    notify,
    readable,
    short_errors,
    without_secrets,
)


def test_a_message_names_what_is_set() -> None:
    error = UsageError(ErrorCode.INVALID_ROW, "it is null.", flag="--data.dataset", value="a.jsonl", row=3)
    assert str(error) == "--data.dataset a.jsonl:3: it is null."
    assert str(UsageError(ErrorCode.CLUSTER, "no Ray cluster answers.")) == "no Ray cluster answers."


def test_a_message_of_any_length_is_readable() -> None:
    error = UsageError(ErrorCode.INVALID_VALUE, "wrong", flag="--a", value="x" * 100_000)
    assert error.value == "x" * 100_000 and len(str(error)) < 400
    assert str(error).endswith("xxx (100,000 characters): wrong")
    assert readable("a\x1b[31m\u202eb\t\nc") == "a\\x1b[31m\\u202eb\t\nc"
    assert len(readable("y" * 100_000)) < 3100


def test_a_single_thing_is_no_plural() -> None:
    assert [counted(n, "row") for n in (0, 1, 2, 1024)] == ["0 rows", "1 row", "2 rows", "1,024 rows"]


def test_the_code_stands_behind_the_first_line() -> None:
    assert describe(RunError(ErrorCode.NOT_FINITE, "NaN.\nResume.")) == "NaN. [not-finite]\nResume."
    assert describe(ValueError("x\ny")) == "x\ny"


def test_an_error_keeps_its_parts_in_a_pickle() -> None:
    error = UsageError(ErrorCode.INVALID_ROW, "null", flag="--data.dataset", value="a.jsonl", row=3)
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), vars(copied)) == (UsageError, str(error), vars(error))


@pytest.mark.parametrize(("kind", "status"), [(UsageError, 2), (RunError, 1)])
def test_a_command_ends_with_the_code_and_its_exit_status(kind, status, capsys) -> None:
    with pytest.raises(SystemExit) as stop, short_errors():
        raise kind(ErrorCode.NOT_FOUND, "there is none.\nName another.", flag="--x", value="y")
    assert stop.value.code == status
    (refusal,) = printed(capsys.readouterr().err)
    assert (refusal.code, refusal.place) == (ErrorCode.NOT_FOUND, "--x y")
    assert refusal.text.splitlines() == ["there is none.", "Name another."]


def test_an_expected_error_is_compared_by_its_parts() -> None:
    with refused(ErrorCode.NOT_FOUND, flag="--x"):
        raise UsageError(ErrorCode.NOT_FOUND, "any text", flag="--x")
    with pytest.raises(AssertionError), refused(ErrorCode.NOT_FOUND, flag="--x"):
        raise UsageError(ErrorCode.NOT_FOUND, "any text", flag="--y")


@pytest.mark.parametrize("part", ["x", "?key", "://", "u:", "http://u:p"])
def test_long_texts_take_no_time_for_their_secrets(part: str) -> None:
    """In the square of the length, a search would take some 10^11 steps."""
    start = time.process_time()
    for text in (part * 300_000, f"http://{part * 300_000}"):
        without_secrets(text)
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://u:p@h:5000/x failed", "http://<redacted>@h:5000/x failed"),
        ("http://h/x?token=abc: HTTP 500", "http://h/x?token=<redacted>: HTTP 500"),
        ("http://h/x?token=<redacted>: HTTP 500", "http://h/x?token=<redacted>: HTTP 500"),
        ("http://u:p@q@h/x", "http://<redacted>@h/x"),
        ("http://h/x?token=abc&n=3#top", "http://h/x?token=<redacted>&n=3#top"),
        ("https://h/x?n=3&X-Amz-Signature=a/b+c==", "https://h/x?n=3&X-Amz-Signature=<redacted>"),
        ("http://u:p@a/x,http://v:q@b/y?sig=1", "http://<redacted>@a/x,http://<redacted>@b/y?sig=<redacted>"),
        ("{'url': 'http://h/x?api_key=abc'}", "{'url': 'http://h/x?api_key=<redacted>'}"),
        ("hf://datasets/org/name@folder?", "hf://datasets/org/name@folder?"),
        ("s3://bucket@folder,s3://key:word@bucket", "s3://bucket@folder,s3://<redacted>@bucket"),
        ('["http://host","me@place?token=1"]', '["http://host","me@place?token=1"]'),
        ("http://h/x?size=5&seed=1 to me@h", "http://h/x?size=5&seed=1 to me@h"),
        ("http://<redacted>@h/x?token=<redacted>", "http://<redacted>@h/x?token=<redacted>"),
    ],
)
def test_secrets_of_urls_are_in_no_message(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert without_secrets(text) == shown
    error = UsageError(ErrorCode.NOT_FOUND, text, flag="--data.dataset", value=text)
    assert str(error) == f"--data.dataset {shown}: {shown}"
    notify(text)
    assert capsys.readouterr().err == f"{shown}\n"


def test_a_machine_without_a_sandbox_is_told_in_every_process() -> None:
    """Errors of workers arrive as pickles."""
    error = SandboxUnavailable("no namespaces")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert (type(each), each.code, each.text) == (
            SandboxUnavailable,
            ErrorCode.UNSUPPORTED,
            "no namespaces",
        )


def test_a_text_that_the_output_cannot_encode_is_escaped() -> None:
    """As under a locale with another encoding than UTF-8."""
    program = "from openrlhf.errors import short_errors\nwith short_errors(): print('4 日 \\U0001f642')"
    made = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONIOENCODING": "gbk"},
        capture_output=True,
        timeout=120,
    )
    assert (made.returncode, made.stdout) == (0, "4 日 \\U0001f642\n".encode("gbk")), made.stderr
