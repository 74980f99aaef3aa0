"""The wait for calls to Ray's actors, with calls that do what the test says."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayTaskError

from openrlhf.cluster import pending
from openrlhf.cluster.pending import STALL, Gathered, results


class Cluster:
    """Stand-in for Ray and a clock. `durations`: seconds that each call takes."""

    def __init__(self, durations: dict[Any, float]) -> None:
        self.now, self.durations = 0.0, durations

    def get(self, refs: list, timeout: float) -> list:
        end = max(self.durations[ref] for ref in refs)
        self.now, is_late = min(end, self.now + timeout), end > self.now + timeout
        if is_late:
            raise GetTimeoutError
        return [ref.value for ref in refs]

    def wait(self, refs: list, num_returns: int, timeout: float, fetch_local: bool) -> tuple[list, list]:
        return [], [ref for ref in refs if self.durations[ref] > self.now]


class Call:
    def __init__(self, actor: str, value: int) -> None:
        self.value = value
        self.task_id = lambda: SimpleNamespace(actor_id=lambda: SimpleNamespace(hex=lambda: actor))


def test_a_long_wait_says_who_waits_for_whom(monkeypatch, capsys):
    monkeypatch.setitem(pending.actor_names, "a", "rank 0 of policy")
    monkeypatch.setitem(pending.actor_names, "b", "rank 1 of policy")
    calls = [Call("a", 1), Call("b", 2)]
    cluster = Cluster({calls[0]: 1.0, calls[1]: 2.5 * STALL})
    monkeypatch.setattr(pending, "ray", cluster)
    monkeypatch.setattr(pending, "time", SimpleNamespace(monotonic=lambda: cluster.now))
    assert Gathered(calls, sum).result() == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(__file__ in line or "pending.py" in line for line in lines)
    assert lines[0].startswith(f"waiting for {STALL:.0f} s for rank 1 of policy: 1 of 2 calls (")
    assert lines[1].startswith(f"waiting for {2 * STALL:.0f} s for rank 1 of policy")


def test_a_call_that_timed_out_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RayTaskError("call", "Traceback ...", GetTimeoutError()).as_instanceof_cause()
    assert isinstance(error, GetTimeoutError)

    def get(refs: list, timeout: float) -> list:
        raise error

    monkeypatch.setattr(pending, "ray", SimpleNamespace(get=get))
    with pytest.raises(GetTimeoutError):
        results([Call("a", 1)])
