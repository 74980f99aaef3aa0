"""A worker of vLLM ends the core when the process that leads is gone."""

import os
import signal
from threading import current_thread

import pytest

from openrlhf.backends.vllm import parent_death_guard


def test_the_core_is_killed_when_the_leader_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, core, sent, paused = 7, 8, [], []

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if (pid, len(paused)) == (leader, 2):
            raise ProcessLookupError

    monkeypatch.setattr(parent_death_guard.os, "kill", kill)
    monkeypatch.setattr(parent_death_guard.time, "sleep", paused.append)
    parent_death_guard._watch(leader, core)
    assert sent == [(leader, 0)] * 3 + [(core, signal.SIGKILL)] and paused == [parent_death_guard.POLL] * 2


@pytest.mark.parametrize("place", ["in the leader", "without one"])
def test_a_process_without_another_leader_follows_nobody(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(
        parent_death_guard.ctypes, "CDLL", lambda _: pytest.fail("it would end with its parent")
    )
    monkeypatch.delenv(parent_death_guard.VARIABLE, raising=False)
    if place == "in the leader":
        monkeypatch.setenv(parent_death_guard.VARIABLE, "0")
        parent_death_guard.lead()
        assert os.environ[parent_death_guard.VARIABLE] == str(os.getpid())
    parent_death_guard.follow()


@pytest.mark.parametrize("is_parent", [True, False])
def test_a_process_ends_with_its_parent_and_watches_another_leader(monkeypatch, is_parent):
    options, watched = [], []

    class Library:
        prctl = staticmethod(lambda *arguments: options.append(arguments))

    monkeypatch.setattr(parent_death_guard.ctypes, "CDLL", lambda _: Library)
    monkeypatch.setattr(
        parent_death_guard, "_watch", lambda *of: watched.append((*of, current_thread().daemon))
    )
    monkeypatch.setenv(parent_death_guard.VARIABLE, str(os.getppid() if is_parent else 2**22 + 1))
    parent_death_guard.follow()
    assert options == [(parent_death_guard.PR_SET_PDEATHSIG, signal.SIGKILL)]
    assert watched == ([] if is_parent else [(2**22 + 1, os.getppid(), True)])
