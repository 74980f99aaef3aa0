"""Reserves the placement that layout.py plans in Ray, and reports the actual one. With GPUs a run has one
placement group, which Ray grants as a whole, and each role has bundles of the group. Without GPUs all
processes share the cores."""

import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.accelerators import get_all_accelerator_managers
from ray.actor import ActorHandle
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from openrlhf.cluster.engine_memory import ExclusiveDevices
from openrlhf.cluster.launch import available_nodes, check_resources, free_gpus, living_nodes, node_names
from openrlhf.cluster.layout import GPU_CLAIM, Layout, RoleLayout, aligned, demands, listed, total
from openrlhf.cluster.pending import results
from openrlhf.config.ppo import PPOConfig
from openrlhf.device import DEVICE_TYPE, VISIBLE_DEVICES
from openrlhf.errors import ErrorCode, RunError
from openrlhf.mesh import Mesh

PATIENCE, REMINDER = 2, 60
"""Seconds of waiting for GPUs until the first message, and between later messages."""


@dataclass(frozen=True, slots=True)
class Bundles:
    """Placement of one role: its bundles of the placement group `group`, which is None without GPUs."""

    group: PlacementGroup | None
    mesh: Mesh
    devices: ExclusiveDevices
    nodes: Sequence[str]
    """Ray's node id of each rank; for engines, of each GPU or process."""
    indices: Sequence[int] = ()
    """Indices of the role's bundles in the group. Empty without GPUs."""
    gpus: int = 1
    """Number of GPUs of each bundle."""
    gpu_claim: float = GPU_CLAIM
    """Fraction of a GPU that a rank requests from Ray."""

    def options(self, rank: int) -> dict:
        """Returns the Ray options of the worker with this rank."""
        if self.group is None:
            return _on_node(self.nodes[rank])
        return {
            "num_cpus": 0,
            "num_gpus": self.gpu_claim,
            "scheduling_strategy": self._bundle(self.group, rank),
        }

    def engine_options(self, index: int, num_gpus: int) -> tuple[dict, dict[str, str]]:
        """Returns the Ray options and environment variables of the engine `index`. An engine manages all of
        its GPUs itself: it requests none from Ray, and gets their ids in the environment."""
        if self.group is None:
            return _on_node(self.nodes[index * num_gpus]), {}
        # Returns (node id, GPU ids) of a bundle. It is a lambda so that Ray pickles it by value: importing it
        # from this module would import torch in the worker.
        where = ray.remote(
            lambda: (ray.get_runtime_context().get_node_id(), sorted(map(str, ray.get_gpu_ids())))
        )
        size = num_gpus // self.gpus
        asked = [
            where.options(
                num_cpus=0,
                num_gpus=GPU_CLAIM if self.gpus == 1 else self.gpus,
                scheduling_strategy=self._bundle(self.group, bundle),
            ).remote()
            for bundle in range(index * size, (index + 1) * size)
        ]
        places = results(asked)
        own = {VISIBLE_DEVICES: ",".join(gpu for _, gpus in places for gpu in gpus)}
        return _on_node(places[0][0]), own | visible_devices_untouched()

    def _bundle(self, group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=self.indices[index])


def _on_node(node: str) -> dict:
    """Returns the Ray options of a worker that claims nothing, on the node with this id."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def visible_devices_untouched() -> dict[str, str]:
    """Returns the environment variables, for all vendors, that keep Ray from setting a process's visible
    devices."""
    vendors = [vars(sys.modules[manager.__module__]) for manager in get_all_accelerator_managers()]
    return {value: "1" for names in vendors for name, value in names.items() if name.startswith("NOSET_")}


def place(config: PPOConfig, layout: Layout) -> dict[str, Bundles]:
    """Reserves the bundles of each role of `layout`. Waits until the cluster grants them, and prints messages
    meanwhile. Raises UsageError if the run can never fit, and RunError if the bundles are not granted within
    train.placement_timeout or split a tensor-parallel group over nodes."""
    devices = {layout.home(role): ExclusiveDevices(shared=layout.on_gpu) for role in layout.roles}
    if not layout.on_gpu:
        ids = [node["NodeID"] for node in living_nodes()]
        return {
            role: Bundles(None, plan.mesh, devices[layout.home(role)], [ids[at.node] for at in plan.devices])
            for role, plan in layout.roles.items()
        }
    group = _reserve(config.run_dir, layout.bundles)
    try:
        _wait_for(group, config)
        return _bundles_of_roles(group, layout, devices)
    except BaseException:  # frees the GPUs after an error
        remove_placement_group(group)
        raise


def _bundles_of_roles(
    group: PlacementGroup, layout: Layout, devices: Mapping[str, ExclusiveDevices]
) -> dict[str, Bundles]:
    """Builds the bundles of each role. `devices`: by the role that owns them."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    granted = in_order(layout.bundles, nodes)
    places = {}
    for role, plan in layout.roles.items():
        size = layout.bundles[plan.first]
        indices = granted[plan.first : plan.first + plan.mesh.size // size]
        held = [nodes[i] for i in indices for _ in range(size)]
        _check_together(plan, held)
        home = devices[layout.home(role)]
        places[role] = Bundles(group, plan.mesh, home, held, indices, size, layout.gpu_claim(role))
    return places


def in_order(sizes: Sequence[int], nodes: Mapping[int, str]) -> list[int]:
    """Returns the index of Ray's bundle for each bundle of the layout. `sizes`: GPUs of each bundle; `nodes`:
    index of Ray's bundle -> its node.

    Ray sorts bundles by size before it fills the nodes, and its sort is not stable for more than 16 equal
    bundles. This function takes Ray's bundles node by node, in the order in which Ray filled the nodes.
    Bundles that the layout puts on one node are then on one node."""
    held: dict[str, list[int]] = defaultdict(list)
    for bundle, node in sorted(nodes.items()):
        held[node].append(bundle)
    largest_first = lambda own: sorted((sizes[i] for i in own), reverse=True)
    filled = sorted(held.values(), key=largest_first, reverse=True)
    of_size = defaultdict(list)
    for bundle in (bundle for own in filled for bundle in own):
        of_size[sizes[bundle]].append(bundle)
    following = {size: iter(bundles) for size, bundles in of_size.items()}
    return [next(following[size]) for size in sizes]


def _check_together(plan: RoleLayout, nodes: Sequence[str]) -> None:
    """Raises RunError if a tensor-parallel group spans several nodes, because a busy cluster may have enough
    free GPUs, but not on one node. `nodes`: node of each of the role's GPUs."""
    size = plan.mesh.tensor
    split = sum(len(set(nodes[i : i + size])) > 1 for i in range(0, len(nodes), size))
    if split:
        text = (
            "all GPUs of one copy of the weights must be on one node, but with the GPUs that are free "
            f"{split} of {len(nodes) // size} copies would span several nodes.\n"
            "Start again when whole nodes are free, or choose a smaller size."
        )
        raise RunError(ErrorCode.RESOURCES, text, flag=plan.size_flags, value=size)


def _reserve(run_dir: str, sizes: Sequence[int]) -> PlacementGroup:
    """Requests a placement group with one bundle for each of `sizes`, the numbers of GPUs. It requests no CPU
    cores, because too few free cores should not keep a run from starting."""
    # Ray rejects a second group of the same name, even while it is removing the first one.
    name = f"{run_dir} (process {os.getpid()} on {platform.node()})"
    return placement_group([{"GPU": size} for size in sizes], strategy="PACK", name=name)


def _wait_for(group: PlacementGroup, config: PPOConfig) -> None:
    start, due, limit = time.monotonic(), PATIENCE, config.train.placement_timeout
    while not group.wait(1):  # Ctrl-C works between these short waits
        waited = time.monotonic() - start
        if limit is not None and waited >= limit:
            text, flag = _shortage(config), "--train.placement_timeout"
            raise RunError(ErrorCode.RESOURCES, text, flag=flag, value=f"{limit:g}")
        if waited >= due:
            check_resources(config)  # a node may have left
            since = f" for {waited / 60:.0f} min" if waited >= REMINDER else ""
            text = f"waiting{since}: {_shortage(config)} It starts when they are free; Ctrl-C gives up."
            print(text, file=sys.stderr, flush=True)
            due = waited + REMINDER


def _shortage(config: PPOConfig) -> str:
    """Returns a message about the GPUs that the run needs, those that are free, and the runs that hold the
    others."""
    needs, gpus, free = demands(config), total(available_nodes(), "GPU"), free_gpus()
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    counts = [sum(bundle.get("GPU", 0) for bundle in group["bundles"].values()) for group in groups]
    held = [
        f"{group['name'] or 'a placement group without a name'} holds {count:g}"
        for group, count in zip(groups, counts, strict=True)
        if count
    ]
    others = gpus - sum(free) - sum(counts)
    if others > 0:
        held.append(f"tasks and actors hold {others:g}")
    apart = f" ({', '.join(f'{count:g}' for count in free)} on the nodes)" if len(free) > 1 else ""
    size = 1 if config.engines_colocated else config.vllm.num_gpus
    whole = f", for an engine {size} of one node" if size > 1 else ""
    return (
        f"the run needs {sum(needs.values())} GPUs ({listed(needs)}{whole}); of the cluster's {gpus}, "
        f"{sum(free):g} are free{apart}{': ' if held else ''}{', '.join(held)}."
    )


def placement_table(members: Mapping[str, Sequence[ActorHandle]], places: Mapping[str, Bundles]) -> str:
    """Returns the actual placement as the processes see it, with one line per role and node; "" if the run
    uses a single node. `members`: processes of each role, in the order of ranks."""
    if len({node for bundles in places.values() for node in bundles.nodes}) == 1:
        return ""
    asked = {role: [member.__ray_call__.remote(_location) for member in own] for role, own in members.items()}
    names, rows = node_names(), [("role", "ranks", "node", "devices", "processes")]
    for role, locations in asked.items():
        on_node: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        for rank, (node, devices, pid) in enumerate(results(locations)):
            on_node[node].append((str(rank), devices, pid))
        for node, found in on_node.items():
            ranks, devices, pids = (", ".join(dict.fromkeys(column)) for column in zip(*found, strict=True))
            rows.append((role, ranks, names[node], devices, pids))
    return "\n".join(["placement:", *aligned(rows)])


def _location(_: object) -> tuple[str, str, str]:
    """Returns Ray's id of the node, the devices and the id of this process."""
    gpus = ray.get_gpu_ids() or os.environ.get(VISIBLE_DEVICES, "").split(",")
    devices = ", ".join(map(str, gpus)) if DEVICE_TYPE == "cuda" else "cores"
    return ray.get_runtime_context().get_node_id(), devices, str(os.getpid())
