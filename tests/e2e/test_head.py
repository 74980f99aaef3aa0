"""Processes of Ray and of a run after the death of Ray's head, or of the run's own process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from openrlhf.cluster.process_reaper import POLL

DRIVER = """
import subprocess, sys
from functools import partial
from types import SimpleNamespace

import ray

from openrlhf.loop.rl_command import end_without_head
from openrlhf.cluster.launch import start_ray
from openrlhf.cluster.watchdog import guard, start_heartbeat


@ray.remote
class Engine:
    def __init__(self):
        start_heartbeat(lambda: (0, False))

    def core(self):
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


start_ray()
engine = Engine.remote()
checkpoints = SimpleNamespace(resume_hint=lambda: "nothing was saved")
stop = SimpleNamespace(is_requested=False)
guard(partial(end_without_head, SimpleNamespace(stop=stop, step=2, total_steps=9, checkpoints=checkpoints)))
print(ray.get(engine.core.remote()), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Starts a process that starts Ray, and an actor with a child process; returns when they run."""
    environment = os.environ | {"RAY_ADDRESS": "local"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen([sys.executable, "-c", DRIVER], stderr=err, env=environment, **pipes)
    with process:
        yield process
        process.kill()


def started(driver: subprocess.Popen) -> list[psutil.Process]:
    assert driver.stdout is not None
    core = psutil.Process(int(driver.stdout.readline()))
    found = psutil.Process(driver.pid).children(recursive=True)
    assert core in found and {"gcs_server", "raylet"} <= {process.name() for process in found}
    return found


@pytest.mark.slow
def test_the_death_of_the_head_ends_all_processes(driver: subprocess.Popen, tmp_path: Path) -> None:
    processes = started(driver)
    next(process for process in processes if process.name() == "gcs_server").kill()
    assert driver.wait(timeout=45) == 1
    assert psutil.wait_procs(processes, timeout=20)[1] == []
    err = (tmp_path / "err").read_text()
    first, log, where = err[err.index("error: ") :].splitlines()
    assert first.startswith("error: Ray's process gcs_server at 127.0.0.1:") and first.endswith(" [cluster]")
    assert Path(log.removeprefix("Its log is ").partition(". ")[0]).exists()
    assert where == "in step 3 of 9; nothing was saved"


def test_the_death_of_the_driver_ends_all_processes(driver: subprocess.Popen) -> None:
    processes = started(driver)
    time.sleep(2 * POLL)
    driver.kill()
    assert driver.wait(timeout=45) == -signal.SIGKILL
    assert psutil.wait_procs(processes, timeout=20)[1] == []
