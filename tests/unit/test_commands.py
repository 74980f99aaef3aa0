"""Answers of `openrlhf` that run no command."""

from importlib import metadata

import pytest
from refusals import refused

from openrlhf.cli.main import COMMANDS, _tell
from openrlhf.errors import ErrorCode


@pytest.mark.parametrize("name", ["--help", "-h", "help"])
def test_the_help_lists_all_commands(name: str, capsys: pytest.CaptureFixture) -> None:
    _tell(name)
    told = capsys.readouterr().out
    assert told.startswith("usage: openrlhf COMMAND ") and all(f"\n  openrlhf {c} " in told for c in COMMANDS)


def test_the_version(capsys: pytest.CaptureFixture) -> None:
    _tell("--version")
    assert capsys.readouterr().out == f"openrlhf {metadata.version('openrlhf')}\n"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("pppo", "did you mean `openrlhf ppo`?"),
        ("train_ppo_ray", "did you mean `openrlhf ppo`?"),
        ("xyz", "the commands are "),
    ],
)
def test_an_unknown_command_is_answered_with_a_near_one(name: str, remedy: str) -> None:
    with refused(ErrorCode.UNKNOWN_FLAG, flag="openrlhf", value=repr(name)) as told:
        _tell(name)
    assert f"there is no such command; {remedy}" in told.value.text
