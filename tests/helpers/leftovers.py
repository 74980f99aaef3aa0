"""Pytest plugin that fails a test run whose processes outlive it; it names these processes and ends them.

Ray clusters and servers that tests share live until their fixtures end, which is before this check. The
processes are found by an environment variable of this run that they inherit, even if they left its session.
"""

import os
import secrets
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

VARIABLE = "OPENRLHF_TEST_RUN"
GRACE_S = 90
"""Seconds that a process may take to end after it was told to. Agents of Ray look for a head that was killed
for 60 s; a busy machine needs more."""
LEFT = pytest.StashKey[dict[int, str]]()
STARTING_S = 0.5
"""Seconds until the first look: a process has no variables for a moment while it is being started."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # processes of xdist inherit the variable
        os.environ[VARIABLE] = secrets.token_hex(16)
        os.environ["SPT_NOENV"] = "1"  # a process that gives itself a name (setproctitle) keeps its variables


@pytest.hookimpl(wrapper=True, trylast=True)  # after xdist has ended its processes, before the summary
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    yield
    if hasattr(session.config, "workerinput"):
        return
    if "ray" in sys.modules:  # Ray that a test started in this process ends only with the process
        sys.modules["ray"].shutdown()
    time.sleep(STARTING_S)
    deadline = time.monotonic() + GRACE_S
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    session.config.stash[LEFT] = left


@pytest.hookimpl(wrapper=True, tryfirst=True)  # its lines are the last, of which a log's end has some
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None]:
    yield
    for pid, process in config.stash.get(LEFT, {}).items():
        terminalreporter.write_line(f"ERROR: process {pid} outlives the tests that started it: {process}")


def leftovers() -> dict[int, str]:
    """Returns the commands of living processes of this run, and in which test each was started, except this
    process and multiprocessing's helpers, which end with it."""
    found = {}
    run = f"{VARIABLE}={os.environ[VARIABLE]}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process ended, or belongs to another user
            continue
        helper = parent == os.getpid() and "from multiprocessing." in command
        if run in variables and command and int(folder.name) != os.getpid() and not helper:
            started = next((v for v in variables if v.startswith(b"PYTEST_CURRENT_TEST=")), b"").decode()
            found[int(folder.name)] = f"{command} ({started})"
    return found
