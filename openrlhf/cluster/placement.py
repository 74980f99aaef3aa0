"""Who sits where. With GPUs a role holds bundles of a Ray placement group; without, everybody shares the
cores."""

from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from openrlhf.config.ppo import PPOConfig

SHARE = 0.2
"""What a worker claims of its GPU, so that colocated roles fit on one."""


class Turns:
    """Models on the same GPUs work one after the other, so that only one of them needs room for it."""

    def __init__(self, needed: bool) -> None:
        self.needed, self.under_way = needed, []

    def take(self, start: Callable[[], list[ray.ObjectRef]]) -> list[ray.ObjectRef]:
        """Call `start` once what was started before is done."""
        if self.needed and self.under_way:
            ray.wait(self.under_way, num_returns=len(self.under_way), fetch_local=False)
        self.under_way = start()
        return self.under_way


@dataclass(frozen=True, slots=True)
class Bundles:
    """The places of one role, or of several that share them, one for each rank. `group` is None without
    GPUs."""

    group: PlacementGroup | None
    count: int
    turns: Turns

    def options(self, rank: int) -> dict:
        """Ray options of the worker with this rank."""
        if self.group is None:
            return {"num_cpus": 0}
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank)
        return {"num_cpus": SHARE, "num_gpus": SHARE, "scheduling_strategy": strategy}

    def engine_options(self, index: int, tensor_parallel_size: int) -> tuple[dict, dict[str, str]]:
        """Ray options and environment of the engine on the bundles from `index * tensor_parallel_size` on. An
        engine drives all of its GPUs itself, so it claims none from Ray and is told which are its own."""
        if self.group is None:
            return {"num_cpus": 0}, {}
        bundles = range(index * tensor_parallel_size, (index + 1) * tensor_parallel_size)
        places = ray.get([_where.options(**self.options(b)).remote() for b in bundles])
        nodes = {node for node, _ in places}
        if len(nodes) > 1:
            raise ValueError(
                f"--vllm.tensor_parallel_size {tensor_parallel_size}: engine {index} would span {len(nodes)} "
                f"nodes. Choose a size that divides the GPUs of a node."
            )
        gpus = ",".join(str(gpu) for _, gpu in places)
        strategy = NodeAffinitySchedulingStrategy(nodes.pop(), soft=False)
        environment = {"CUDA_VISIBLE_DEVICES": gpus, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        return {"num_cpus": 0, "scheduling_strategy": strategy}, environment


def place(config: PPOConfig, on_gpu: bool) -> tuple[dict[str, Bundles], Bundles]:
    """Reserve what the run needs: the places of each role, and those of the engines. Blocks until the cluster
    has granted it."""
    bundles: dict[str, Bundles] = {}
    for role, home in config.homes.items():
        bundles[role] = bundles[home.host] if home.host else _reserve(home.num_workers, on_gpu)
    if config.train.colocate_all and on_gpu:
        return bundles, bundles["actor"]
    return bundles, _reserve(config.num_engines * config.vllm.tensor_parallel_size, on_gpu)


def _reserve(count: int, on_gpu: bool) -> Bundles:
    if not on_gpu:
        return Bundles(None, count, Turns(needed=False))
    group = placement_group([{"GPU": 1, "CPU": 1}] * count, strategy="PACK")
    ray.get(group.ready())
    return Bundles(group, count, Turns(needed=True))


@ray.remote
def _where() -> tuple[str, int]:
    """(node, GPU) of the bundle that this runs on."""
    return ray.get_runtime_context().get_node_id(), int(ray.get_gpu_ids()[0])
