"""Options of commands without a configuration class: their values, their defaults and their help."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from openrlhf.cli.completion import parser_of
from openrlhf.cli.main import COMMANDS, reader_of
from openrlhf.config import commands
from openrlhf.errors import ErrorCode

CONFIGURED = {command.name for command in commands.COMMANDS}
PLAN = {"cluster": None, "prompt_tokens": None, "response_tokens": None, "rows": None, "rates": None}
LEAST: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("zsh", {"shell": "zsh"}),
    "demo": ("", {"model": "tiny", "seed": 0, "steps": 30, "folder": Path("demo")}),
    "init": (
        "",
        dict.fromkeys(("what", "model", "data", "gpus", "output", "reward"))
        | {"file": Path("run.yaml"), "yes": False},
    ),
    "schema": ("sft", {"command": "sft"}),
    "plan": ("", PLAN | {"json": False}),
    "check": ("", PLAN | {"no_color": False}),
    "rehearse": ("", PLAN | {"json": False, "keep": False}),
    "data": ("", {"samples": 3, "no_color": False}),
    "agent": (
        "try a.py --model m --prompt p",
        {"file": "a.py", "model": "m", "prompt": "p", "label": "", "samples": 1},
    ),
    "verify": (
        "",
        {"rows": 8, "tokens": 512, "layers": None, "no_ranks": False, "no_engine": False}
        | {"out": Path("verification.json")},
    ),
    "doctor": ("", {"run": None, "model": None, "json": False, "report": False}),
    "explain": ("conflict", {"error": ["conflict"]}),
    "fetch": ("smollm2", {"model": "smollm2", "output": None}),
    "rollouts": (
        "run",
        {"run": Path("run"), "step": None, "prompt": None, "failed": False, "sort": None, "name": "step"}
        | {"limit": 8},
    ),
    "watch": ("run", {"run": Path("run"), "once": False, "width": None}),
    "view": ("a b", {"runs": [Path("a"), Path("b")], "port": 8890, "no_browser": False}),
    "replay": ("run --step 3", {"run": Path("run"), "step": 3, "folder": None}),
    "bisect": ("a", {"run_a": Path("a"), "run_b": None, "commits": None, "step": None, "repository": None}),
}
"""Command -> (the shortest command line, its values)."""
OF_A_RUN = "--cluster 8xH100 --prompt_tokens 2 --response_tokens 3 --rows 4 --rates r.json"
OF_A_RUN_READ = {"cluster": "8xH100", "prompt_tokens": 2, "response_tokens": 3, "rows": 4} | {
    "rates": Path("r.json")
}
ALL: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": (
        "--model smollm2 --seed 7 --steps 5 --folder f",
        {"model": "smollm2", "seed": 7, "steps": 5, "folder": Path("f")},
    ),
    "fetch": ("--output o", {"output": Path("o")}),
    "init": (
        "--what sft --model m --data d --gpus 2 --output o --reward r --file f.yaml --yes",
        {"what": "sft", "model": "m", "data": "d", "gpus": "2", "output": "o", "reward": "r"}
        | {"file": Path("f.yaml"), "yes": True},
    ),
    "plan": (f"{OF_A_RUN} --json", OF_A_RUN_READ | {"json": True}),
    "check": (f"{OF_A_RUN} --no_color", OF_A_RUN_READ | {"no_color": True}),
    "rehearse": (f"{OF_A_RUN} --json --keep", OF_A_RUN_READ | {"json": True, "keep": True}),
    "data": ("--samples 0 --no-color", {"samples": 0, "no_color": True}),
    "agent": ("--label l --samples 2", {"label": "l", "samples": 2}),
    "verify": (
        "--rows 2 --tokens 3 --layers 4 --no_ranks --no_engine --out o.json",
        {"rows": 2, "tokens": 3, "layers": 4, "no_ranks": True, "no_engine": True, "out": Path("o.json")},
    ),
    "doctor": (
        "run --model m --json --report",
        {"run": Path("run"), "model": Path("m"), "json": True, "report": True},
    ),
    "rollouts": (
        "--step 2 --prompt 3 --failed --sort score --name eval --limit 4",
        {"step": 2, "prompt": 3, "failed": True, "sort": "score", "name": "eval", "limit": 4},
    ),
    "watch": ("--once --width 40", {"once": True, "width": 40}),
    "view": ("--port 0 --no_browser", {"port": 0, "no_browser": True}),
    "replay": ("--folder f", {"folder": Path("f")}),
    "bisect": (
        "b --commits good bad --step 2 --repository r",
        {"run_b": Path("b"), "commits": ["good", "bad"], "step": 2, "repository": Path("r")},
    ),
}
"""Command -> (further words with every other option, what they change)."""


def parsers_of(name: str) -> Iterator[argparse.ArgumentParser]:
    """Yields the parsers of a command, or those of its subcommands."""
    parser = parser_of(name)
    assert parser
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    yield from inner[0].choices.values() if inner else [parser]


def test_every_command_with_such_options_is_listed() -> None:
    assert {name for name in COMMANDS.keys() - CONFIGURED if parser_of(name)} == LEAST.keys()


@pytest.mark.parametrize("name", LEAST)
def test_what_the_options_mean(name: str) -> None:
    words, values = LEAST[name]
    assert vars(parser_of(name).parse_args(shlex.split(words))) == values
    more, changes = ALL.get(name, ("", {}))
    assert vars(parser_of(name).parse_args(shlex.split(f"{words} {more}"))) == values | changes


@pytest.mark.parametrize("name", LEAST)
def test_the_help_names_the_command_and_explains_every_option(name: str) -> None:
    for parser in parsers_of(name):
        assert re.sub(" (try|record|preview)$", "", parser.prog) == f"openrlhf {name}"
        assert parser.format_usage().startswith(f"usage: {parser.prog} ")
        module, read = reader_of(name)
        read = getattr(module, "record") if parser.prog.endswith(" record") else read  # noqa: B009
        about = (read.__doc__ or module.__doc__ or "").split()
        assert (parser.description or "").split()[:4] == about[:4]
        for action in parser._actions:
            assert action.help or action.dest == "shell", action.dest
            if action.nargs != 0:  # it has a value, which the help names in capitals
                option = action.dest.upper() if action.option_strings else action.dest
                names = action.metavar or action.choices or option
                names = [names] if isinstance(names, str) else names
                assert action.choices or all(re.match(r"[{A-Z]", name) for name in names), action.dest


@pytest.mark.parametrize("name", LEAST)
def test_a_default_that_the_help_names_is_the_default(name: str) -> None:
    for parser in parsers_of(name):
        for action in parser._actions:
            if (found := re.search(r"\(default: ([\w.]+)[;)]", action.help or "")) and action.default:
                assert str(action.default) == found[1], action.dest


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        *(("demo", flag) for flag in ("--seed", "--steps")),
        *(("plan", flag) for flag in ("--prompt_tokens", "--response_tokens", "--rows")),
        *(("verify", flag) for flag in ("--rows", "--tokens", "--layers")),
        *(("rollouts", flag) for flag in ("--step", "--prompt", "--sort", "--name", "--limit")),
        *(
            ("agent", "--samples"),
            ("data", "--samples"),
            ("watch", "--width"),
            ("view", "--port"),
            ("replay", "--step"),
        ),
        *(("bisect", "--step"), ("bisect", "--commits")),
    ],
)
def test_a_wrong_value_of_an_option_is_refused(name: str, flag: str) -> None:
    with refused(ErrorCode.INVALID_VALUE, flag=flag):
        parser_of(name).parse_args([*shlex.split(LEAST[name][0]), flag, "many"])
