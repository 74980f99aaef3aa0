"""The argument parser of commands without a configuration class, such as demo, rollouts, agent and plan."""

import argparse
import re
from typing import NoReturn

from openrlhf.errors import ErrorCode, UsageError

_MESSAGES = (
    (r"argument ([^:]+): (.+)", ErrorCode.INVALID_VALUE, r"\2"),
    (r"the following arguments are required: (.+)", ErrorCode.MISSING_FLAG, "required, but not set"),
    (r"unrecognized arguments: (.+)", ErrorCode.UNKNOWN_FLAG, "there is no such option"),
)
"""Patterns of argparse's messages, whose first group is the flag, with the code and the text of our error."""


class ArgumentParser(argparse.ArgumentParser):
    """Argument parser that raises UsageError instead of printing the usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        remedy = f"see `{self.prog} --help`"
        for pattern, code, text in _MESSAGES:
            if match := re.fullmatch(pattern, message, re.DOTALL):
                raise UsageError(code, f"{match.expand(text)}; {remedy}", flag=match[1])
        raise UsageError(ErrorCode.INVALID_VALUE, f"{message}; {remedy}")


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
