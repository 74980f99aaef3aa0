"""The table of processes and their nodes."""

from types import SimpleNamespace

import pytest

from openrlhf.cluster import placement
from openrlhf.cluster.placement import placement_table

pytestmark = pytest.mark.processes


def process(node: str, devices: str, pid: int) -> SimpleNamespace:
    return SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda ask: (node, devices, str(pid))))


def test_there_is_a_line_for_each_role_on_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "results", list)
    names = {"a": "10.0.0.1 (node-1)", "b": "10.0.0.2 (node-2)"}
    monkeypatch.setattr(placement, "node_names", lambda: names)
    members = {
        "engines": [process("b", "0, 1", 11)],
        "policy": [process("a", "0", 21), process("b", "1", 22), process("a", "1", 23)],
    }
    places = {"engines": SimpleNamespace(nodes=["b", "b"]), "actor": SimpleNamespace(nodes=["a", "b", "a"])}
    assert placement_table(members, places).splitlines() == [
        "placement:",
        "role     ranks  node               devices  processes",
        "engines  0      10.0.0.2 (node-2)  0, 1     11",
        "policy   0, 2   10.0.0.1 (node-1)  0, 1     21, 23",
        "policy   1      10.0.0.2 (node-2)  1        22",
    ]


def test_a_run_on_one_node_has_none() -> None:
    """The processes are not queried."""
    assert placement_table({"policy": [None]}, {"actor": SimpleNamespace(nodes=["a", "a"])}) == ""
