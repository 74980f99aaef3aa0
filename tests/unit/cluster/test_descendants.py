"""Processes that the program which ends a run's processes finds and kills, on a machine made up here."""

import os
import signal

import pytest

from openrlhf.cluster import process_reaper
from openrlhf.cluster.process_reaper import descendants, reap

OWNER = 10


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """Returns the processes: parent and start time, by number."""
    found: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(process_reaper.os, "listdir", lambda place: ["meminfo", *map(str, found)])
    monkeypatch.setattr(process_reaper, "_stat", lambda pid: found.get(pid, (0, 0)))
    return found


def test_descendants_of_any_degree_are_found_whatever_their_order(machine: dict) -> None:
    machine |= {3: (4, 90), 4: (5, 80), 5: (OWNER, 70), OWNER: (1, 60), 6: (1, 50), os.getpid(): (OWNER, 75)}
    assert descendants(OWNER, {}) == {3: 90, 4: 80, 5: 70}


def test_known_processes_count_without_their_parents(machine: dict) -> None:
    """Processes whose parent has ended belong to the first process. The number of one that ended may be that
    of a stranger."""
    machine |= {3: (1, 90), 4: (3, 95), 5: (1, 99)}
    assert descendants(OWNER, {3: 90}) == {3: 90, 4: 95}
    assert descendants(OWNER, {3: 90, 5: 70, 7: 80}) == {3: 90, 4: 95}


def test_what_is_left_of_a_run_is_killed(machine: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    killed, paused = [], []
    machine |= {3: (OWNER, 90), 4: (3, 95), 5: (OWNER, 70), 6: (1, 50)}

    def sleep(seconds: float) -> None:
        paused.append(seconds)
        machine[5] = (1, 99)  # another process has got the number
        del machine[4]

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        raise ProcessLookupError

    read, write = os.pipe()
    os.close(write)  # `read` is ready at once, like the file of a process that has ended
    monkeypatch.setattr(process_reaper.os, "pidfd_open", lambda pid: read)
    monkeypatch.setattr(process_reaper.os, "kill", kill)
    monkeypatch.setattr(process_reaper.time, "sleep", sleep)
    reap(OWNER)
    os.close(read)
    assert paused == [process_reaper.GRACE] and killed == [(3, signal.SIGKILL)]
