"""The command of reinforcement learning that starts again after the death of a process."""

import os
import sys

import pytest
from ray.exceptions import RayActorError

from openrlhf.cli import train_ppo_ray
from openrlhf.cli.train_ppo_ray import RESTARTS, restart_after
from openrlhf.config.ppo import PPOCkptConfig, PPOConfig, TrainConfig
from openrlhf.errors import ErrorCode, RunError

DEATH = RunError(ErrorCode.WORKER_FAILED, "a rank of the policy died: process 17")
PROGRAM = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    found: list[list[str]] = []
    monkeypatch.delenv(RESTARTS, raising=False)
    monkeypatch.setattr(train_ppo_ray.os, "execv", lambda program, argv: found.append([program, *argv[1:]]))
    return found


def config_of(*, max_restarts: int, resumes: bool = False) -> PPOConfig:
    return PPOConfig(
        train=TrainConfig(max_restarts=max_restarts), ckpt=PPOCkptConfig(load_enable=resumes, save_steps=2)
    )


@pytest.mark.parametrize("error", [DEATH, RayActorError(error_msg="gone")])
def test_a_lost_process_starts_the_run_again_from_its_checkpoint(
    started: list, capsys: pytest.CaptureFixture, error: Exception
) -> None:
    error.add_note("in step 3 of 9; the last checkpoint is a/global_step2")
    for count in (1, 2, 3):
        restart_after(error, config_of(max_restarts=2), ["--x", "y"])
        assert len(started) == min(count, 2)
    assert started == [[*PROGRAM, "--x", "y", "--ckpt.load_enable"]] * 2
    said = capsys.readouterr().err
    assert "in step 3 of 9" in said and "restart 2 of at most 2" in said and os.environ[RESTARTS] == "2"
    os.environ.pop(RESTARTS)


def test_a_run_that_resumes_keeps_its_command(started: list) -> None:
    restart_after(DEATH, config_of(max_restarts=1, resumes=True), ["--ckpt.load_enable"])
    assert started == [[*PROGRAM, "--ckpt.load_enable"]]
    os.environ.pop(RESTARTS)


def test_other_errors_end_the_run(started: list) -> None:
    for error in (RunError(ErrorCode.NOT_FINITE, "NaN"), KeyError("x")):
        restart_after(error, config_of(max_restarts=3), [])
    restart_after(DEATH, config_of(max_restarts=0), [])
    assert not started
