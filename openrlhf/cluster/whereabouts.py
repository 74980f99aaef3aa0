"""Reports the actual placement of a run: node, devices and process ids of each role, as its processes see
them."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray
from ray.actor import ActorHandle

from openrlhf.cluster.launch import node_names
from openrlhf.cluster.layout import aligned
from openrlhf.cluster.pending import results
from openrlhf.cluster.placement import Bundles
from openrlhf.device import DEVICE_TYPE, VISIBLE_DEVICES


class Location(NamedTuple):
    """Node, devices and process id of one process."""

    node: str
    """Ray's node id."""
    devices: str
    pid: int


def placement_table(members: Mapping[str, Sequence[ActorHandle]], places: Mapping[str, Bundles]) -> str:
    """Returns a table with one line per role and node; "" if the run uses a single node. `members`: processes
    of each role, in the order of ranks."""
    if len({node for bundles in places.values() for node in bundles.nodes}) == 1:
        return ""
    asked = {
        role: [process.__ray_call__.remote(_location) for process in own] for role, own in members.items()
    }
    names = node_names()
    rows = [row for role, locations in asked.items() for row in _rows(role, results(locations), names)]
    head = ("role", "ranks", "node", "devices", "processes")
    return "\n".join(["placement:", *aligned([head, *rows])])


def _location(_: object) -> Location:
    gpus = ray.get_gpu_ids() or os.environ.get(VISIBLE_DEVICES, "").split(",")
    devices = ", ".join(map(str, gpus)) if DEVICE_TYPE == "cuda" else "cores"
    return Location(ray.get_runtime_context().get_node_id(), devices, os.getpid())


def _rows(role: str, locations: Sequence[Location], names: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Returns the table's rows of one role. `locations`: one per rank; `names`: Ray's node id -> name."""
    on_node: dict[str, list[int]] = defaultdict(list)
    for rank, location in enumerate(locations):
        on_node[location.node].append(rank)
    return [
        (
            role,
            ", ".join(map(str, ranks)),
            names[node],
            ", ".join(dict.fromkeys(locations[rank].devices for rank in ranks)),
            ", ".join(str(locations[rank].pid) for rank in ranks),
        )
        for node, ranks in on_node.items()
    ]
