"""The program that ends a run's processes when the run's own process is gone."""

import os
import subprocess
import sys

import psutil
import pytest

from openrlhf.cluster import process_reaper

pytestmark = pytest.mark.processes
OWNER = """
import subprocess, sys, time

from openrlhf.cluster.process_reaper import start_process_reaper

# one write for each number, because two processes share the pipe
child = "import os, time, subprocess as s; p = s.Popen(['sleep', '300']); os.write(1, f'{p.pid} '.encode());"
one = subprocess.Popen([sys.executable, "-c", child + "time.sleep(300)"], start_new_session=True)
gone = subprocess.Popen([sys.executable, "-c", child + "time.sleep(4)"])
print(start_process_reaper().pid, one.pid, gone.wait(), flush=True)
time.sleep(300)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_all_descendants_end_with_the_owner() -> None:
    """Also one in another session, and one whose parent has ended before."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(n) for n in owner.stdout.readline().split() if int(n)]
        assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids)
        owner.kill()
        processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        assert psutil.wait_procs(processes, timeout=60)[1] == []


def test_other_processes_are_left_alone() -> None:
    found = process_reaper.descendants(os.getpid(), {os.getppid(): 0, 1: 0})
    assert not {1, os.getpid(), os.getppid()} & found.keys()
