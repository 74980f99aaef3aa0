"""Commands and loops of RL that start again after the death of a process."""

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from ray.exceptions import RayActorError

from openrlhf.cli import train_ppo_ray
from openrlhf.config.parse import Invocation, parse
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_command import PPO
from openrlhf.errors import ErrorCode, RunError
from openrlhf.loop import restarts, rl_command
from openrlhf.loop.restarts import RESTARTS, restart_after

DEATH = RunError(ErrorCode.WORKER_FAILED, "a rank of the policy died: process 17")


COMMAND = ["-m", "openrlhf.cli.train_ppo_ray"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    found: list[list[str]] = []
    monkeypatch.delenv(RESTARTS, raising=False)
    monkeypatch.setattr(restarts.os, "execv", lambda program, argv: found.append([program, *argv[1:]]))
    yield found
    os.environ.pop(RESTARTS, None)


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Runs the command with these flags, whose training loses a process."""

    def run(config: PPOConfig, argv: Sequence[str], clock: object) -> None:
        raise DEATH

    def command(*flags: str) -> None:
        monkeypatch.setattr(rl_command, "run", run)
        monkeypatch.setattr(train_ppo_ray, "parse", lambda command, argv, **how: parsed(argv, tmp_path))
        with pytest.raises(SystemExit):
            train_ppo_ray.main(flags)

    return command


def parsed(argv: Sequence[str], folder: Path) -> Invocation[PPOConfig]:
    needed = "--actor.model_name_or_path none --data.prompt_dataset none --reward.remote_url http://none"
    return parse(PPO, [*argv, *needed.split(), "--ckpt.path", str(folder), "--ckpt.save_steps", "2"])


@pytest.mark.parametrize("error", [DEATH, RayActorError(error_msg="gone")])
def test_a_lost_process_starts_the_run_again_from_its_checkpoint(started, capsys, error):
    error.add_note("in step 3 of 9; the last checkpoint is a/global_step2")
    for count in (1, 2, 3):
        restart_after(error, 2, ["x.py", "y"])
        assert len(started) == min(count, 2)
    assert started == [[sys.executable, "x.py", "y"]] * 2
    said = capsys.readouterr().err
    assert "in step 3 of 9" in said and "restart 2 of at most 2" in said and os.environ[RESTARTS] == "2"


def test_lines_of_a_program_are_written_before_it_starts_again(started, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    print("reward 0.5")
    restart_after(DEATH, 1, ["x.py"])
    assert len(started) == 1 and written.getvalue() == b"reward 0.5\n"


def test_a_command_goes_on_from_its_checkpoint(started: list, dying: Callable) -> None:
    dying("--train.max_restarts", "1")
    again = [sys.executable, *COMMAND, "--train.max_restarts", "1", "--ckpt.load_enable"]
    assert started == [again]
    os.environ.pop(RESTARTS)
    dying("--train.max_restarts", "1", "--ckpt.load_enable")
    assert started == [again, again], "a run that resumes keeps its command"


def test_other_errors_end_the_run(started: list) -> None:
    for error in (RunError(ErrorCode.NOT_FINITE, "NaN"), KeyError("x")):
        restart_after(error, 3, [])
    restart_after(DEATH, 0, [])
    assert not started


def test_a_program_that_is_in_no_file_is_not_started_again(started, capsys):
    restart_after(DEATH, 1, [])
    assert not started and "the loop's program is not in a file" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize("how", ["file", "-c", "-"])
def test_a_program_knows_how_to_start_itself_again(tmp_path: Path, how: str) -> None:
    """One from standard input would find nothing there, and end as if it had succeeded."""
    text = "from openrlhf.loop.restarts import own_program; print(own_program())"
    (tmp_path / "loop.py").write_text(text)
    words = {"file": [str(tmp_path / "loop.py"), "x"], "-c": ["-c", text, "x"], "-": ["-", "x"]}[how]
    command = [sys.executable, *words]
    made = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert made.stdout == f"{[] if how == '-' else words}\n", made.stderr
