import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from openrlhf.cli import completion, main
from openrlhf.config.command import Command
from openrlhf.config.commands import PPO, SFT
from openrlhf.config.fields import list_flags

ZSH = """
compdef() { }
_describe() { local -a all=("${(@P)argv[-1]}"); print -l -- ${all%%:*} }
_files() { print files }
compadd() { local -a all=("${(@P)2}"); (( $#all )) && print -l -- $all }
compset() { PREFIX=${PREFIX#*=} }
source $1
shift
words=("$@") CURRENT=$# PREFIX=$argv[-1]
_openrlhf
"""
"""Stands for the parts of zsh that only an interactive shell has, and prints what they are given."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    paths = {}
    for shell in ("bash", "zsh", "fish"):
        paths[shell] = folder / f"openrlhf.{shell}"
        paths[shell].write_text(completion.script(shell))
    return paths


def _output(*command: str | Path) -> list[str]:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.stdout.splitlines()


def in_bash(script: Path, *words: str) -> list[str]:
    """Returns what bash would offer for the last word. "=" is a word of its own, as in readline."""
    call = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _openrlhf; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return [word for word in _output("bash", "--norc", "-c", call, "-", script, *words) if word]


def in_zsh(script: Path, *words: str) -> list[str]:
    joined = " ".join(words).replace(" = ", "=").split(" ")
    found = [word for word in _output("zsh", "-f", "-c", ZSH, "-", script, *joined) if word]
    value = joined[-1].partition("=")[2] if "=" in joined[-1] else joined[-1]
    return [] if found == ["files"] else [word for word in found if word.startswith(value)]


def in_fish(script: Path, *words: str) -> list[str]:
    line = " ".join(words).replace(" = ", "=")
    lines = _output("fish", "--no-config", "-c", f"source {script}; complete -C '{line}'")
    found = [line.partition("\t")[0].rpartition("=")[2] for line in lines]
    return [word for word in found if not Path(word).exists()]


@pytest.fixture(params=[in_bash, in_zsh, in_fish], ids=["bash", "zsh", "fish"])
def complete(request: pytest.FixtureRequest, scripts: dict[str, Path]) -> Callable[..., list[str]]:
    shell = request.param.__name__.removeprefix("in_")
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    return lambda *words: sorted(request.param(scripts[shell], *words))


def test_commands(complete: Callable[..., list[str]]) -> None:
    assert complete("openrlhf", "") == sorted(main.COMMANDS)
    assert complete("openrlhf", "ro") == ["rollouts"]


@pytest.mark.parametrize("command", [SFT, PPO], ids=lambda command: command.name)
def test_all_flags_of_a_configuration(complete: Callable[..., list[str]], command: Command) -> None:
    found = set(complete("openrlhf", command.name, "--max", "1", "--"))
    assert {f"--{key}" for key in list_flags(command.config_type)} < found
    assert ("--print_plan" in found) == command.has_plan
    assert complete("openrlhf", command.name, "--train.bat") == ["--train.batch_size"]


def test_flags_of_a_command_without_configuration(complete: Callable[..., list[str]]) -> None:
    assert complete("openrlhf", "rollouts", "RUN", "--s") == ["--sort", "--step"]


def test_flags_of_the_run_that_is_planned(complete: Callable[..., list[str]]) -> None:
    assert complete("openrlhf", "plan", "run.yaml", "--rollout.batch") == ["--rollout.batch_size"]
    assert complete("openrlhf", "plan", "run.yaml", "--rate") == ["--rates"]
    assert complete("openrlhf", "plan", "dpo", "--model.beta") == ["--model.beta"]
    assert complete("openrlhf", "plan", "dpo", "--rollout.batch") == []
    assert complete("openrlhf", "data", "preview", "sft", "--model.model_n") == ["--model.model_name_or_path"]


def test_words_after_a_command(complete: Callable[..., list[str]]) -> None:
    assert complete("openrlhf", "completion", "") == ["bash", "fish", "zsh"]
    assert complete("openrlhf", "data", "pre") == ["preview"]
    assert complete("openrlhf", "data", "preview", "k") == ["kd", "kto"]


@pytest.mark.parametrize("equals", [[], ["="]], ids=["space", "equals"])
def test_values(complete: Callable[..., list[str]], equals: list[str]) -> None:
    assert complete("openrlhf", "ppo", "--train.backend", *equals, "t") == ["torch"]
    assert complete("openrlhf", "ppo", "--algo.advantage.estimator", *equals, "group") == ["group_norm"]
    assert complete("openrlhf", "sft", "--ds.packing_samples", *equals, "f") == ["false"]


def test_a_free_value_is_left_to_the_completion_of_files(complete, tmp_path, monkeypatch):
    (tmp_path / "data.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert complete("openrlhf", "sft", "--data.dataset", "da") == []


def test_bash_completes_files(scripts: dict[str, Path]) -> None:
    assert "complete -o default -F _openrlhf openrlhf" in scripts["bash"].read_text()


def test_every_command_has_flags() -> None:
    assert [name for name, flags in completion.flags_of_commands().items() if not flags] == []


def test_names_need_no_quotes() -> None:
    flags = [flag for flags in completion.flags_of_commands().values() for flag in flags]
    assert all(re.fullmatch(r"[\w.+-]+", word) for flag in flags for word in (flag.name, *flag.values))
