"""A folder has one living run."""

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys

import pytest
from refusals import refused

from openrlhf.errors import ErrorCode
from openrlhf.observability.lock import locked

HOLD = """
import sys, time
from openrlhf.observability.lock import locked
with locked(sys.argv[1], flag="--x"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_told_who_is_there(tmp_path, holder):
    about = {"flag": "--ckpt.path", "value": tmp_path}
    with refused(ErrorCode.IN_USE, **about) as told, locked(tmp_path, flag="--ckpt.path"):
        pytest.fail("it was let in")
    assert f"process {holder.pid} on {os.uname().nodename}, since 2" in told.value.text


def test_a_dead_run_leaves_no_lock(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with locked(tmp_path, flag="--x"):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_lock_ends_with_a_run_that_fails(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="of the run"), locked(tmp_path / "new", flag="--x"):
            raise RuntimeError("of the run")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog, number):
    def flock(file, operation):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path, flag="--x"):
        (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(tmp_path) in record.getMessage()


def test_another_error_of_a_lock_is_raised(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="broken disk"), locked(tmp_path, flag="--x"):
        pytest.fail("it was let in")
