"""A run's places, granted by Ray as layout.py plans them. With GPUs a run holds one placement group, whole or
not at all, and each role bundles of it; without, everybody shares the cores."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from openrlhf.cluster.launch import available_nodes, check_resources, free_gpus
from openrlhf.cluster.layout import SHARE, Layout, demands, listed, total
from openrlhf.cluster.residency import ExclusiveDevices
from openrlhf.config.ppo import PPOConfig
from openrlhf.mesh import Mesh

PATIENCE, REMINDER = 2, 60
"""Seconds of waiting for GPUs before the first line about it, and between further ones."""


@dataclass(frozen=True, slots=True)
class Bundles:
    """The places of one role: bundles of `group` from `first` on, one for each rank or each engine. `group`
    is None without GPUs."""

    group: PlacementGroup | None
    mesh: Mesh
    devices: ExclusiveDevices
    first: int = 0
    gpus: int = 1
    """Of each bundle."""
    share: float = SHARE
    """Of its GPU that a rank claims."""

    def options(self, rank: int) -> dict:
        """Ray options of the worker with this rank."""
        if self.group is None:
            return {"num_cpus": 0}
        return {"num_cpus": 0, "num_gpus": self.share, "scheduling_strategy": self._bundle(self.group, rank)}

    def engine_options(self, index: int, tensor_parallel_size: int) -> tuple[dict, dict[str, str]]:
        """Ray options and environment of the engine on its share of the bundles. An engine drives all of its
        GPUs itself, so it claims none from Ray and is told which are its own."""
        if self.group is None:
            return {"num_cpus": 0}, {}
        size = tensor_parallel_size // self.gpus
        asked = [
            _where.options(
                num_cpus=0,
                num_gpus=SHARE if self.gpus == 1 else self.gpus,
                scheduling_strategy=self._bundle(self.group, bundle),
            ).remote()
            for bundle in range(index * size, (index + 1) * size)
        ]
        places = ray.get(asked)
        nodes = {node for node, _ in places}
        if len(nodes) > 1:
            raise ValueError(
                f"--vllm.tensor_parallel_size {tensor_parallel_size}: engine {index} would span {len(nodes)} "
                f"nodes. Choose a size that divides the GPUs of a node."
            )
        devices = ",".join(str(gpu) for _, gpus in places for gpu in gpus)
        strategy = NodeAffinitySchedulingStrategy(nodes.pop(), soft=False)
        environment = {"CUDA_VISIBLE_DEVICES": devices, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        return {"num_cpus": 0, "scheduling_strategy": strategy}, environment

    def _bundle(self, group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=self.first + index)


def place(config: PPOConfig, layout: Layout) -> dict[str, Bundles]:
    """Reserve what the run needs: the places of each role of `layout`. Waits until the cluster has granted
    it, and says what for; raises ValueError where it never can."""
    group = _reserve(config, layout.bundles) if layout.on_gpu else None
    devices = {layout.home(role): ExclusiveDevices(shared=layout.on_gpu) for role in layout.roles}
    return {
        role: Bundles(
            group,
            plan.mesh,
            devices[layout.home(role)],
            plan.first,
            layout.bundles[plan.first] if layout.on_gpu else 1,
            layout.share(role),
        )
        for role, plan in layout.roles.items()
    }


def _reserve(config: PPOConfig, sizes: Sequence[int]) -> PlacementGroup:
    """A placement group with one bundle of each of these numbers of GPUs. It claims no cores: they would only
    keep a run off a cluster that has the GPUs."""
    group = placement_group([{"GPU": size} for size in sizes], strategy="PACK", name=config.run_dir)
    start, due = time.monotonic(), PATIENCE
    while not group.wait(1):  # Ctrl-C is heard in between
        waited = time.monotonic() - start
        if waited >= due:
            check_resources(config)  # a node may have gone
            since = f" since {waited / 60:.0f} min" if waited >= REMINDER else ""
            print(f"waiting{since}: {_shortage(config)}", file=sys.stderr, flush=True)
            due = waited + REMINDER
    return group


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
    others = gpus - free - sum(counts)
    if others > 0:
        held.append(f"tasks and actors hold {others:g}")
    return (
        f"the run needs {sum(needs.values())} GPUs ({listed(needs)}); of the cluster's {gpus}, {free:g} are "
        f"free{': ' if held else ''}{', '.join(held)}. It starts when they are; Ctrl-C gives up."
    )


@ray.remote
def _where() -> tuple[str, list[int]]:
    """(node, GPUs) of the bundle that this runs on."""
    return ray.get_runtime_context().get_node_id(), [int(gpu) for gpu in ray.get_gpu_ids()]
