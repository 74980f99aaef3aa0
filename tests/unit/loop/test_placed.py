"""The processes of a user's loop on a cluster: what was started ends in the opposite order."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.config.ppo import PPOConfig
from openrlhf.loop import placed
from openrlhf.loop.placed import PlacedRoles


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the calls to the stand-in for the cluster."""
    found: list[Any] = []
    note = lambda name, answer=None: lambda *arguments: found.append((name, *arguments)) or answer

    @contextmanager
    def naming_logs():
        found.append(("name logs",))
        yield
        found.append(("logs named",))

    watchdog = SimpleNamespace(start=note("watch"), close=note("watch no more"))
    roles = SimpleNamespace(end=note("end"), watchdog=lambda config: watchdog, members=[])
    layout = SimpleNamespace(on_gpu="on gpu")
    for name, answer in (("start_ray", None), ("stop_ray", None), ("check_disks", None), ("place", "places")):
        monkeypatch.setattr(placed, name, note(name, answer))
    monkeypatch.setattr(placed, "naming_logs", naming_logs)
    monkeypatch.setattr(placed, "check_resources", lambda config: layout)
    monkeypatch.setattr(placed, "start_roles", note("start", roles))
    return found


def test_all_that_was_started_ends(calls: list[Any]) -> None:
    config = PPOConfig()
    roles = PlacedRoles(config, updates=7)
    assert calls == [
        ("start_ray", ["deepspeed", "vllm"]),
        ("name logs",),
        ("place", config, SimpleNamespace(on_gpu="on gpu")),
        ("check_disks", config, "places"),
        ("start", config, "places", "on gpu", 7, 7, None),
        ("watch",),
    ]
    calls.clear()
    roles.close()
    assert calls == [("watch no more",), ("end",), ("logs named",), ("stop_ray",)]


def test_ray_is_left_where_no_process_could_start(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed, "start_roles", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        PlacedRoles(PPOConfig(), updates=7)
    assert calls[-1] == ("stop_ray",)
