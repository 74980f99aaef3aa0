"""Who runs where, as the processes of a run say it themselves."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray
from ray.actor import ActorHandle

from openrlhf.cluster.launch import node_names
from openrlhf.cluster.layout import aligned
from openrlhf.cluster.placement import Bundles
from openrlhf.device import DEVICE_TYPE, VISIBLE_DEVICES


class Spot(NamedTuple):
    """Of a process."""

    node: str
    """Ray's name of it."""
    devices: str
    pid: int


def who_runs_where(members: Mapping[str, Sequence[ActorHandle]], places: Mapping[str, Bundles]) -> str:
    """A table for people, a line for each role on each node, where the run has several nodes; else "".
    `members`: the processes of each role, rank by rank."""
    if len({node for bundles in places.values() for node in bundles.nodes}) == 1:
        return ""
    asked = {role: [process.__ray_call__.remote(_spot) for process in own] for role, own in members.items()}
    names = node_names()
    rows = [row for role, spots in asked.items() for row in _rows(role, ray.get(spots), names)]
    head = ("role", "ranks", "node", "devices", "processes")
    return "\n".join(["who runs where:", *aligned([head, *rows])])


def _spot(_: object) -> Spot:
    gpus = ray.get_gpu_ids() or os.environ.get(VISIBLE_DEVICES, "").split(",")
    devices = ", ".join(map(str, gpus)) if DEVICE_TYPE == "cuda" else "cores"
    return Spot(ray.get_runtime_context().get_node_id(), devices, os.getpid())


def _rows(role: str, spots: Sequence[Spot], names: Mapping[str, str]) -> list[tuple[str, ...]]:
    """`spots`: of each rank; `names`: of each node."""
    on_node: dict[str, list[int]] = defaultdict(list)
    for rank, spot in enumerate(spots):
        on_node[spot.node].append(rank)
    return [
        (
            role,
            ", ".join(map(str, ranks)),
            names[node],
            ", ".join(dict.fromkeys(spots[rank].devices for rank in ranks)),
            ", ".join(str(spots[rank].pid) for rank in ranks),
        )
        for node, ranks in on_node.items()
    ]
