"""Errors of commands without a configuration class."""

import pytest
from refusals import refused

from openrlhf.errors import ErrorCode
from openrlhf.tools.command_line.arguments import ArgumentParser


@pytest.mark.parametrize(
    ("argv", "code", "flag"),
    [
        (["run", "--step", "x"], ErrorCode.INVALID_VALUE, "--step"),
        (["run", "--step"], ErrorCode.INVALID_VALUE, "--step"),
        ([], ErrorCode.MISSING_FLAG, "RUN"),
        (["run", "--steps", "1"], ErrorCode.UNKNOWN_FLAG, "--steps 1"),
    ],
)
def test_an_invalid_command_line_has_a_code(argv: list[str], code: ErrorCode, flag: str) -> None:
    parser = ArgumentParser(prog="openrlhf rollouts")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--step", type=int)
    with refused(code, flag=flag):
        parser.parse_args(argv)
