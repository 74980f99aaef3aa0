"""A worker of vLLM ends the core when the process that leads is gone."""

import os
import signal
from threading import current_thread

import pytest

from openrlhf.backends.vllm import lifeline


def test_the_core_is_killed_when_the_leader_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, core, sent, paused = 7, 8, [], []

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if (pid, len(paused)) == (leader, 2):
            raise ProcessLookupError

    monkeypatch.setattr(lifeline.os, "kill", kill)
    monkeypatch.setattr(lifeline.time, "sleep", paused.append)
    lifeline._watch(leader, core)
    assert sent == [(leader, 0)] * 3 + [(core, signal.SIGKILL)] and paused == [lifeline.POLL] * 2


@pytest.mark.parametrize("place", ["in the leader", "without one"])
def test_a_process_without_another_leader_follows_nobody(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(lifeline.ctypes, "CDLL", lambda _: pytest.fail("it would end with its parent"))
    monkeypatch.delenv(lifeline.VARIABLE, raising=False)
    if place == "in the leader":
        monkeypatch.setenv(lifeline.VARIABLE, "0")
        lifeline.lead()
        assert os.environ[lifeline.VARIABLE] == str(os.getpid())
    lifeline.follow()


@pytest.mark.parametrize("is_parent", [True, False])
def test_a_process_ends_with_its_parent_and_watches_another_leader(
    monkeypatch: pytest.MonkeyPatch, is_parent: bool
) -> None:
    options, watched = [], []

    class Library:
        prctl = staticmethod(lambda *arguments: options.append(arguments))

    monkeypatch.setattr(lifeline.ctypes, "CDLL", lambda _: Library)
    monkeypatch.setattr(lifeline, "_watch", lambda *of: watched.append((*of, current_thread().daemon)))
    monkeypatch.setenv(lifeline.VARIABLE, str(os.getppid() if is_parent else 2**22 + 1))
    lifeline.follow()
    assert options == [(lifeline.PR_SET_PDEATHSIG, signal.SIGKILL)]
    assert watched == ([] if is_parent else [(2**22 + 1, os.getppid(), True)])
