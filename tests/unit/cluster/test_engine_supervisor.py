"""Deaths and replacements of engines, whose processes do what the test tells them."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError
from refusals import refused

from openrlhf.backends.rollout import EngineDied
from openrlhf.backends.weight_sync.client import EnginesFailedError
from openrlhf.cluster import engine_supervisor
from openrlhf.cluster.engine_supervisor import MAX_RESTARTS, WINDOW, EngineSupervisor
from openrlhf.errors import ErrorCode

DEATH = RayActorError(error_msg="class_name: EngineActor\n\tpid: 17\n\tip: 10.0.0.1\n")
CORE_DEATH = RayTaskError("finished_groups", "Traceback ...", EngineDied(ErrorCode.ENGINE_FAILED, "gone"))


class Cluster:
    """Stand-in for Ray and a clock. `starts`: what the pending starts of processes are: None while they last,
    an error, or True."""

    def __init__(self) -> None:
        self.now = 0.0
        self.created: list[int] = []
        self.killed: list[str] = []
        self.lost: list[int] = []
        self.failed: list[BaseException] = []
        self.starts: dict[str, Any] = {}

    def create(self, number: int) -> str:
        self.created.append(number)
        return f"engine {number}, process {len(self.created)}"

    def start(self, member: str) -> str:
        self.starts[member] = None
        return member

    def kill(self, member: str) -> None:
        self.killed.append(member)

    def wait(self, refs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return [ref for ref in refs if self.starts[ref] is not None], []

    def get(self, ref: str, timeout: float) -> None:
        if isinstance(self.starts[ref], BaseException):
            raise self.starts[ref]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(engine_supervisor, "ray", cluster)
    cluster.ObjectRef = object
    monkeypatch.setattr(engine_supervisor, "time", SimpleNamespace(monotonic=lambda: cluster.now))
    return cluster


@pytest.fixture
def engines(cluster: Cluster) -> EngineSupervisor:
    return EngineSupervisor(
        2, create=cluster.create, start=cluster.start, lose=cluster.lost.append, fail=cluster.failed.append
    )


def revive(cluster: Cluster, engines: EngineSupervisor, number: int) -> None:
    """Lets the successor of an engine start, as soon as it is due, and serve."""
    cluster.now += 60
    engines.begin_restarts()
    cluster.starts[engines.members[number]] = True
    assert engines.started() == [number] and engines.serve(number)


@pytest.mark.parametrize("death", [DEATH, CORE_DEATH])
def test_an_engine_that_dies_is_replaced_once(cluster, engines, death, capsys):
    first = engines.members[1]
    for _ in range(3):  # each of its requests fails
        assert engines.report(1, first, death)
    assert (cluster.lost, engines.serving, engines.is_dead(1)) == ([1], [0], True)
    engines.begin_restarts()
    engines.begin_restarts()
    assert (cluster.created, cluster.killed) == ([0, 1, 1], [first])
    assert engines.started() == [] and not engines.is_dead(1)
    assert engines.report(1, first, death)  # a late one
    cluster.starts[engines.members[1]] = True
    assert engines.loaded == [0]
    assert engines.started() == [1] and engines.started() == [1] and engines.serving == [0]
    assert engines.loaded == [0, 1]
    assert engines.serve(1) and engines.all_serve
    assert (engines.take_restarts(), engines.take_restarts()) == (1, 0)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in (said[0], said[-1]) if not line.startswith("engine 1 ")] == []
    assert re.search(rf"\b1\b.*\b1\b.*\b{MAX_RESTARTS}\b", said[0])


def test_an_error_of_users_code_is_no_death(cluster: Cluster, engines: EngineSupervisor) -> None:
    wrong = EnginesFailedError(3, {0: "it loaded other weights"}, 2)
    for error in (RayTaskError("submit_groups", "...", KeyError("label")), wrong):
        assert not engines.report(0, engines.members[0], error)
    assert engines.all_serve and not cluster.lost


def test_an_engine_that_dies_again_and_again_ends_the_run(cluster, engines):
    for _ in range(MAX_RESTARTS):
        engines.report(0, engines.members[0], DEATH)
        revive(cluster, engines, 0)
    engines.report(0, engines.members[0], DEATH)
    with refused(ErrorCode.ENGINE_FAILED) as refusal:
        engines.begin_restarts()
    assert f"engine 0 died {MAX_RESTARTS + 1} times" in refusal.value.text
    assert "process 17 on 10.0.0.1" in refusal.value.text
    assert cluster.failed == [engines.failure] and cluster.lost == [0] * MAX_RESTARTS


def test_old_deaths_do_not_count(cluster: Cluster, engines: EngineSupervisor) -> None:
    for _ in range(3 * MAX_RESTARTS):
        engines.report(0, engines.members[0], DEATH)
        revive(cluster, engines, 0)
        cluster.now += WINDOW / MAX_RESTARTS
    assert engines.all_serve


def test_a_successor_that_does_not_start_is_tried_again_later_and_later(cluster, engines):
    engines.report(0, engines.members[0], DEATH)
    waits = []
    for _ in range(MAX_RESTARTS - 1):
        engines.begin_restarts()
        cluster.starts[engines.members[0]] = RayTaskError("start", "...", RuntimeError("no memory"))
        begun, count = cluster.now, len(cluster.created)
        assert engines.started() == [] and engines.is_dead(0)
        while len(cluster.created) == count:
            cluster.now += 1
            engines.begin_restarts()
        waits.append(cluster.now - begun)
    assert waits == [2, 4, 8, 16]
    cluster.starts[engines.members[0]] = RayTaskError("start", "...", RuntimeError("no memory"))
    engines.started()
    with refused(ErrorCode.ENGINE_FAILED, told="no memory"):
        engines.begin_restarts()


def test_a_successor_that_hangs_while_it_starts(cluster: Cluster, engines: EngineSupervisor) -> None:
    engines.report(0, engines.members[0], DEATH)
    engines.begin_restarts()
    cluster.now += engine_supervisor.START_TIMEOUT + 1
    assert engines.started() == [] and engines.is_dead(0)


def test_a_new_engine_that_dies_before_it_serves(cluster: Cluster, engines: EngineSupervisor) -> None:
    engines.report(0, engines.members[0], DEATH)
    engines.begin_restarts()
    engines.report(0, engines.members[0], DEATH)
    assert not engines.serve(0) and engines.is_dead(0)
