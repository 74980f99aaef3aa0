"""Help of commands, which imports nothing heavy."""

import os
import signal
import subprocess
import sys

import pytest
from command_lines import refused, run
from refusals import printed

from openrlhf.config.commands import COMMANDS, PPO, SFT
from openrlhf.config.fields import list_flags
from openrlhf.config.parse import parse
from openrlhf.config.reference import page
from openrlhf.errors import ErrorCode

HELP = """
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
parse(PPO, ['--help'])
"""


def test_parsing_imports_nothing_heavy():
    heavy = "{'torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'datasets', 'numpy'}"
    code = f"""
import sys
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parse import parse
for command in COMMANDS:
    try: parse(command, ["--help"])
    except SystemExit: pass
    try: parse(command, ["--config", "none.yaml", "--x"])
    except SystemExit: pass
assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)
"""
    assert run("-c", code).returncode == 0


def test_commands_refuse_flags_before_they_import_anything_heavy():
    """A flag that does not exist, one of the wrong type and a missing one are refused before heavy
    imports."""
    heavy = "{'torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'datasets', 'pandas'}"
    code = f"""
import sys
from openrlhf.cli.main import main
for name in {[command.name for command in COMMANDS]}:
    try: main([name, "--ds.param_dtype", "int3", "--nothing.of.the.kind", "1"])
    except SystemExit as stop: assert stop.code == 2
assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    codes = [problem.code for problem in printed(done.stderr)]
    for code in (ErrorCode.UNKNOWN_FLAG, ErrorCode.INVALID_VALUE):
        assert codes.count(code) == len(COMMANDS)
    assert codes.count(ErrorCode.MISSING_FLAG) >= len(COMMANDS)


def test_help_into_a_pipe_that_closes():
    result = subprocess.run(
        f'{sys.executable} -c "{HELP}" | head -1', shell=True, capture_output=True, text=True, cwd=os.getcwd()
    )
    assert result.stdout.startswith("usage: openrlhf ppo") and result.stderr == ""


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        "openrlhf.cli.main",
        "openrlhf.cli.main completion bash",
        "openrlhf.tools.plan.init --what sft --model m --data d --gpus 0 --yes",
    ],
)
def test_output_that_nobody_reads_ends_a_command_as_sigpipe_does(words, tmp_path):
    read, write = os.pipe()
    os.close(read)
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", *words.split()]
    result = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=os.environ | paths
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")
    if "init" in words:  # the file is whole
        assert parse(SFT, ["--config", str(tmp_path / "run.yaml")]).config.data.dataset == "d"


def shown(command, argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(command, argv)
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_explains_every_flag(command, capsys):
    text = shown(command, ["--help"], capsys)
    for key, field in list_flags(command.config_type).items():
        assert f"  --{key}" in text
        assert field.help.endswith((".", ")")), f"--{key} has no docstring"
    assert max(map(len, text.splitlines())) <= 160


def test_help_with_a_word_finds_present_and_old_names(capsys):
    text = shown(PPO, ["--help", "lora-rank"], capsys)
    assert "--ds.lora.rank INT (default: 0)" in text and "alpha" not in text
    assert shown(PPO, ["--help=lora"], capsys).count("  --ds.lora.") == 4
    (unknown,) = printed(refused(PPO, ["--help", "lora.rankk"], capsys))
    assert (unknown.code, unknown.place) == ("unknown-flag", "--help lora.rankk")
    assert "--ds.lora.rank" in unknown.text
    (unknown,) = printed(refused(PPO, ["--help", "qqqq"], capsys))
    assert unknown.text.splitlines()[0] == "no flag has this in its name"


def test_help_shows_the_values_in_force(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("zero_stage: 3\n")
    assert "--ds.zero_stage INT (now: 3)" in shown(
        PPO, ["--config", str(tmp_path / "a.yaml"), "--help"], capsys
    )


def test_the_reference_names_every_flag():
    text = page(*COMMANDS)
    for command in COMMANDS:
        for name in [*list_flags(command.config_type), *command.old_flags]:
            assert f"`--{name}`" in text
    assert run("-m", "openrlhf.config.reference").stdout.startswith(text.partition("\n\n## ")[0])
