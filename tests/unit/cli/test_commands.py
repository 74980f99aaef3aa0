"""Answers of `openrlhf` that run no command."""

import re
import runpy
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
from refusals import refused

from openrlhf.cli import main as main_module
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
        ("infer", "did you mean `openrlhf batch_inference`?"),
        ("train", "the commands are "),  # and not `explain`, which has four letters of it
        ("xyz", "the commands are "),
    ],
)
def test_an_unknown_command_is_answered_with_a_near_one(name: str, remedy: str) -> None:
    with refused(ErrorCode.UNKNOWN_FLAG, flag="openrlhf", value=repr(name)) as told:
        _tell(name)
    assert f"there is no such command; {remedy}" in told.value.text


def test_a_package_adds_a_command_and_replaces_none(tmp_path, monkeypatch, capsys):
    """As an installed package has them: a module, and entry points in the metadata beside it."""
    (tmp_path / "house_tool.py").write_text("def main(argv):\n    print('house', argv)\n")
    (tmp_path / "house-1.0.dist-info").mkdir()
    (tmp_path / "house-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: house\nVersion: 1.0\n"
    )
    points = "[openrlhf.commands]\nhouse = house_tool\nppo = house_tool\n"
    (tmp_path / "house-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    fresh = runpy.run_path(str(main_module.__file__))
    assert fresh["COMMANDS"]["house"] == ("house_tool", "of the package house")
    assert fresh["COMMANDS"]["ppo"] == COMMANDS["ppo"]
    fresh["main"](["house", "--much"])
    assert capsys.readouterr().out == "house ['--much']\n"


def test_the_help_of_every_command_imports_nothing_heavy() -> None:
    code = f"""
import sys
from openrlhf.cli.main import main
for name in {list(COMMANDS)}:
    try: main([name, "--help"])
    except SystemExit: pass
heavy = {{"torch", "numpy", "ray", "vllm", "deepspeed", "transformers", "datasets", "pyarrow"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_what_a_command_runs_exists() -> None:
    files = Path(main_module.__file__).parents[1].glob("tools/*/*.py")
    named = [
        name for file in files for name in re.findall(r'run\(\s*"(openrlhf[\w.]+:\w+)"', file.read_text())
    ]
    assert len(named) >= 18
    for module, _, name in (place.partition(":") for place in named):
        assert callable(getattr(import_module(module), name)), f"{module}:{name}"
