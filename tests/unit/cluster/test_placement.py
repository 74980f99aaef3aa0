"""Placement of models that share devices."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ray._private import accelerators

from openrlhf.cluster import placement
from openrlhf.cluster.pending import Answer
from openrlhf.cluster.placement import (
    GPU_CLAIM,
    VISIBLE_DEVICES,
    Bundles,
    ExclusiveDevices,
    visible_devices_untouched,
)
from openrlhf.config.ppo import PPOConfig
from openrlhf.mesh import Mesh


def test_models_on_shared_devices_wait_for_what_was_started_before():
    devices, seen = ExclusiveDevices(shared=True), []
    for refs in (["score 0", "score 1"], ["update"], ["score 2"]):
        assert devices.run(lambda after, refs=refs: seen.append(after) or refs) == refs
    assert seen == [[], ["score 0", "score 1"], ["update"]]


def test_models_on_devices_of_their_own_wait_for_nobody():
    devices, seen = ExclusiveDevices(shared=False), []
    for refs in (["score"], ["update"]):
        assert devices.run(lambda after, refs=refs: seen.append(after) or refs) == refs
    assert seen == [[], []]


def test_what_could_not_be_started_is_not_waited_for():
    devices = ExclusiveDevices(shared=True)
    devices.run(lambda after: ["score"])
    with pytest.raises(ZeroDivisionError):
        devices.run(lambda after: 1 / 0)
    assert devices.run(lambda after: after) == ["score"]


def test_ray_leaves_the_devices_of_every_vendor_that_it_knows_alone():
    """The variables are all those of this kind in Ray's source."""
    texts = [path.read_text() for path in Path(accelerators.__path__[0]).glob("*.py")]
    known = {name for text in texts for name in re.findall(r"RAY_EXPERIMENTAL_NOSET_\w+", text)}
    assert visible_devices_untouched() == dict.fromkeys(known, "1")
    assert {f"RAY_EXPERIMENTAL_NOSET_{name}_VISIBLE_DEVICES" for name in ("CUDA", "HIP", "ASCEND_RT")} < known


def node_of(number: int) -> str:
    """Returns Ray's id of a machine."""
    return f"{number + 1:056x}"


class Where:
    """Takes the place of a task of Ray that tells where its bundle is: two GPUs of each of two machines."""

    asked: ClassVar[list[tuple[int, float]]] = []

    def options(self, *, num_cpus: int, num_gpus: float, scheduling_strategy: Any) -> SimpleNamespace:
        index = scheduling_strategy.placement_group_bundle_index
        self.asked.append((index, num_gpus))
        gpus = [str(index % 2)] if num_gpus < 1 else ["0", "1"]
        where = node_of(index // 2 if num_gpus < 1 else index)
        return SimpleNamespace(remote=lambda: Answer((where, gpus)))


@pytest.mark.parametrize(
    ("gpus", "num_gpus", "asked", "visible"),
    [
        (1, 1, [(3, GPU_CLAIM)], "1"),
        (1, 2, [(4, GPU_CLAIM), (5, GPU_CLAIM)], "0,1"),
        (2, 2, [(3, 2)], "0,1"),
        (2, 4, [(4, 2), (5, 2)], "0,1,0,1"),
    ],
)
def test_an_engine_gets_the_gpus_of_its_own_bundles(monkeypatch, gpus, num_gpus, asked, visible):
    """Its process is on the machine of the first. `asked`: of the second engine, whose role's bundles begin
    at number 2 of the group."""
    monkeypatch.setattr(Where, "asked", [])
    monkeypatch.setattr(placement.ray, "remote", lambda function: Where())
    bundles = Bundles(
        group="group",
        mesh=Mesh(),
        devices=ExclusiveDevices(shared=False),
        nodes=[],
        indices=range(2, 10),
        gpus=gpus,
    )
    options, variables = bundles.engine_options(1, num_gpus)
    assert Where.asked == asked
    first = asked[0][0]
    assert options["num_cpus"] == 0 and "num_gpus" not in options
    assert options["scheduling_strategy"].node_id == node_of(first // 2 if gpus == 1 else first)
    assert variables == {VISIBLE_DEVICES: visible} | visible_devices_untouched()


def test_processes_without_gpus_are_where_the_plan_has_them():
    nodes = [node_of(number) for number in range(4)]
    bundles = Bundles(group=None, mesh=Mesh(), devices=ExclusiveDevices(shared=False), nodes=nodes)
    options, variables = bundles.engine_options(1, num_gpus=2)
    assert (options["num_cpus"], options["scheduling_strategy"].node_id, variables) == (0, nodes[2], {})
    assert bundles.options(3)["scheduling_strategy"].node_id == nodes[3]


def test_the_runs_that_hold_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(free: list[float], **groups: list[float]) -> str:
        table = {
            name: {"name": name, "state": "CREATED", "bundles": {i: {"GPU": n} for i, n in enumerate(counts)}}
            for name, counts in groups.items()
        }
        table["waiting"] = {"name": "waiting", "state": "PENDING", "bundles": {0: {"GPU": 8}}}
        monkeypatch.setattr(placement, "placement_group_table", lambda: table)
        monkeypatch.setattr(placement, "free_gpus", lambda: free)
        text = placement._shortage(PPOConfig())
        return text[text.index("of the cluster's") :]

    monkeypatch.setattr(placement, "available_nodes", lambda: [{"GPU": 4, "CPU": 8}, {"GPU": 4}, {"CPU": 8}])
    assert told([8]) == "of the cluster's 8, 8 are free."
    assert told([1, 2], other=[2, 1], idle=[0]) == (
        "of the cluster's 8, 3 are free (1, 2 on the nodes): other holds 3, tasks and actors hold 2."
    )
