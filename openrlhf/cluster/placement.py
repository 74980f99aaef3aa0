"""A run's places, granted by Ray as layout.py plans them. With GPUs a run holds one placement group, whole or
not at all, and each role bundles of it; without, everybody shares the cores."""

import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.accelerators import get_all_accelerator_managers
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from openrlhf.cluster.engine_memory import ExclusiveDevices
from openrlhf.cluster.launch import available_nodes, check_resources, free_gpus, living_nodes
from openrlhf.cluster.layout import GPU_CLAIM, Layout, RoleLayout, demands, listed, total
from openrlhf.config.ppo import PPOConfig
from openrlhf.device import VISIBLE_DEVICES
from openrlhf.mesh import Mesh

PATIENCE, REMINDER = 2, 60
"""Seconds of waiting for GPUs before the first line about it, and between further ones."""


@dataclass(frozen=True, slots=True)
class Bundles:
    """The places of one role: bundles of `group`, one for each rank or each engine. `group` is None without
    GPUs."""

    group: PlacementGroup | None
    mesh: Mesh
    devices: ExclusiveDevices
    nodes: Sequence[str]
    """Of each rank, by Ray's names; of engines, of each of their processes."""
    indices: Sequence[int] = ()
    """Ray's numbers of the bundles."""
    gpus: int = 1
    """Of each bundle."""
    gpu_claim: float = GPU_CLAIM
    """Of its GPU that a rank claims."""

    def options(self, rank: int) -> dict:
        """Ray options of the worker with this rank."""
        if self.group is None:
            return {"num_cpus": 0, "scheduling_strategy": self._node(rank)}
        return {
            "num_cpus": 0,
            "num_gpus": self.gpu_claim,
            "scheduling_strategy": self._bundle(self.group, rank),
        }

    def engine_options(self, index: int, num_gpus: int) -> tuple[dict, dict[str, str]]:
        """Ray options and environment of the engine on its part of the bundles. An engine drives all of its
        GPUs itself, so it claims none from Ray and is told which are its own."""
        if self.group is None:
            return {"num_cpus": 0, "scheduling_strategy": self._node(index * num_gpus)}, {}
        # (node, its GPUs as its Ray names them) of a bundle. Made here, so that Ray takes it along: a worker
        # that imports it from a module imports torch.
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
        places = ray.get(asked)
        strategy = NodeAffinitySchedulingStrategy(places[0][0], soft=False)
        own = {VISIBLE_DEVICES: ",".join(gpu for _, gpus in places for gpu in gpus)}
        return {"num_cpus": 0, "scheduling_strategy": strategy}, own | hands_off()

    def _node(self, rank: int) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(self.nodes[rank], soft=False)

    def _bundle(self, group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=self.indices[index])


def hands_off() -> dict[str, str]:
    """The variables that keep Ray from choosing what devices a process sees, of every vendor that it
    knows."""
    vendors = [vars(sys.modules[manager.__module__]) for manager in get_all_accelerator_managers()]
    return {value: "1" for names in vendors for name, value in names.items() if name.startswith("NOSET_")}


def place(config: PPOConfig, layout: Layout) -> dict[str, Bundles]:
    """Reserve what the run needs: the places of each role of `layout`. Waits until the cluster has granted
    it, and says what for; raises ValueError where it never can, and RuntimeError where it has not in
    train.placement_timeout, or not together what belongs together."""
    devices = {layout.home(role): ExclusiveDevices(shared=layout.on_gpu) for role in layout.roles}
    if not layout.on_gpu:
        return _on_cores(layout, devices)
    group = _reserve(config, layout.bundles)
    try:
        _wait_for(group, config)
        return _bundles_of_roles(group, layout, devices)
    except BaseException:  # who goes on without a place shall not hold one
        remove_placement_group(group)
        raise


def _on_cores(layout: Layout, devices: Mapping[str, ExclusiveDevices]) -> dict[str, Bundles]:
    """`devices`: of each home."""
    ids = [node["NodeID"] for node in living_nodes()]
    places = {}
    for role, plan in layout.roles.items():
        held = [ids[device.node] for device in plan.devices]
        places[role] = Bundles(None, plan.mesh, devices[layout.home(role)], held)
    return places


def _bundles_of_roles(
    group: PlacementGroup, layout: Layout, devices: Mapping[str, ExclusiveDevices]
) -> dict[str, Bundles]:
    """`devices`: of each home."""
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
    """Which of Ray's bundles are those of the layout, one after the other. `sizes`: GPUs of each bundle;
    `nodes`: the node of each.

    Bundles of one size are alike to Ray, which sorts them by size before it fills node after node, and its
    sort mixes up equal ones where there are more than 16. Taken node by node, in the order in which nodes
    were filled, they are as planned: what is together there has GPUs of one node."""
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
    """`nodes`: of each of the role's GPUs. A busy cluster may have room for a run, but not where it needs
    it."""
    size = plan.mesh.tensor
    torn = sum(len(set(nodes[i : i + size])) > 1 for i in range(0, len(nodes), size))
    if torn:
        raise RuntimeError(
            f"{plan.size_flags} {size}: the GPUs of one copy of the weights are on one node, and of what "
            f"others left free the cluster gave {torn} of {len(nodes) // size} copies GPUs of several.\n"
            "Start again when whole nodes are free, or choose a smaller size."
        )


def _reserve(config: PPOConfig, sizes: Sequence[int]) -> PlacementGroup:
    """A placement group with one bundle of each of these numbers of GPUs. It claims no cores: they would only
    keep a run off a cluster that has the GPUs."""
    # Ray refuses a second group of one name, also while the first is still being removed.
    name = f"{config.run_dir} (process {os.getpid()} on {platform.node()})"
    return placement_group([{"GPU": size} for size in sizes], strategy="PACK", name=name)


def _wait_for(group: PlacementGroup, config: PPOConfig) -> None:
    start, due, limit = time.monotonic(), PATIENCE, config.train.placement_timeout
    while not group.wait(1):  # Ctrl-C is heard in between
        waited = time.monotonic() - start
        if limit is not None and waited >= limit:
            raise RuntimeError(f"--train.placement_timeout {limit:g}: {_shortage(config)}")
        if waited >= due:
            check_resources(config)  # a node may have gone
            since = f" since {waited / 60:.0f} min" if waited >= REMINDER else ""
            text = f"waiting{since}: {_shortage(config)} It starts when they are; Ctrl-C gives up."
            print(text, file=sys.stderr, flush=True)
            due = waited + REMINDER


def _shortage(config: PPOConfig) -> str:
    """What the run needs, what the cluster has, and who holds it."""
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
