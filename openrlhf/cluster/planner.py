"""Chooses placement flags for a cluster (`--placement auto`). They decide where things run, never what is
learned.

All models share their GPUs. Engines share them, too (hybrid engine); with train.async_enable engines have
half of all GPUs for themselves. Flags that the user set are not changed."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from openrlhf.cluster.layout import Nodes, resource_problems, total
from openrlhf.config.checks import uneven_batch
from openrlhf.config.fields import values_of, with_values
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_checks import engines_beside_actor, optimizer_sleep

WEIGHTS_FRACTION = 0.5
"""Fraction of a GPU's memory for an engine's weights. The rest is for the KV cache and for models."""

SIZE = ("actor.num_nodes", "actor.num_gpus_per_node")


def suitable_flags(
    config: PPOConfig, explicit: Container[str], nodes: Nodes, tensor_parallel_size: int = 1
) -> dict[str, Any]:
    """Returns new values of flags. `explicit`: flags that the user set, which are not changed.

    The actor gets the largest number of GPUs that divides train.batch_size evenly, consists of complete
    sequence-parallel and tensor-parallel groups, and fits nodes with complete engines. With
    train.async_enable the actor gets at most half of all GPUs, and engines get the others. Without GPUs ranks
    are processes that share the cores. If nothing fits, returns the first candidate, whose problems the
    checks then report. `tensor_parallel_size`: tensor-parallel size of an engine, if the user set none."""
    planner = _Planner(explicit, nodes)
    shared = planner.set(
        config, {"train.colocate_all": True, "vllm.tensor_parallel_size": tensor_parallel_size}
    )
    tried = (planner.sized(shared, shape) for shape in planner.actor_shapes(shared))
    first = next(tried, shared)
    placed = first if planner.suits(first) else next(filter(planner.suits, tried), first)
    before, after = values_of(config), values_of(planner.with_sleep(placed))
    return {key: value for key, value in after.items() if value != before[key]}


def least_tensor_parallel_size(weight_bytes: int, gpu_bytes: int) -> int:
    """Returns the smallest power of two of GPUs such that an engine's weights fit into WEIGHTS_FRACTION of
    the memory of each. Both arguments are in bytes."""
    size = 1
    while weight_bytes > size * WEIGHTS_FRACTION * gpu_bytes:
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class _Planner:
    explicit: Container[str]
    nodes: Nodes

    @property
    def gpus(self) -> list[int]:
        """Number of GPUs of each node."""
        return [int(node.get("GPU", 0)) for node in self.nodes]

    def set(self, config: PPOConfig, values: Mapping[str, Any]) -> PPOConfig:
        return with_values(config, {key: v for key, v in values.items() if key not in self.explicit})

    def sized(self, config: PPOConfig, shape: tuple[int, int]) -> PPOConfig:
        """Returns the configuration with the actor's `shape`, (nodes, GPUs per node), and engines on the
        other GPUs."""
        config = self.set(config, dict(zip(SIZE, shape, strict=True)))
        if config.engines_colocated or not any(self.gpus):
            return config
        size = config.vllm.num_gpus
        whole = sum(gpus // size for gpus in self.gpus)
        left = (sum(self.gpus) - config.actor.num_gpus) // size
        return self.set(config, {"vllm.num_engines": max(1, min(whole, left))})

    def with_sleep(self, config: PPOConfig) -> PPOConfig:
        """Returns the configuration with sleep enabled for engines and models that share GPUs."""
        if not (config.engines_colocated and any(self.gpus)):
            return config
        config = self.set(config, {"vllm.enable_sleep": True})
        asleep = self.set(config, {"ds.enable_sleep": not config.ds.adam_offload})
        return config if any(optimizer_sleep(asleep)) else asleep

    def actor_shapes(self, config: PPOConfig) -> Iterator[tuple[int, int]]:
        """Yields candidates for the actor's shape, (nodes, GPUs per node), best first."""
        asked = (config.actor.num_nodes, config.actor.num_gpus_per_node)
        fixed = [key in self.explicit for key in SIZE]
        if all(fixed):
            yield asked
            return
        for count in self._actor_counts(config, any(fixed)):
            shapes = ((n, count // n) for n in range(1, count + 1) if count % n == 0)
            if any(fixed):
                shapes = (s for s in shapes if all(s[i] == asked[i] for i in (0, 1) if fixed[i]))
            else:
                shapes = filter(self._is_of_nodes, shapes)
            yield from islice(shapes, 1)

    def suits(self, config: PPOConfig) -> bool:
        """Returns True if the configuration passes the checks of placement."""
        uneven = uneven_batch(config, config.train.batch_size, config.data_parallel_size)
        torn = config.actor.num_gpus % config.placements["actor"].mesh.replica
        return not (
            uneven or torn or any(engines_beside_actor(config)) or resource_problems(config, self.nodes)
        )

    def _is_of_nodes(self, shape: tuple[int, int]) -> bool:
        """Returns True if a shape is a part of one node, or divides every node evenly."""
        num_nodes, per_node = shape
        is_part = num_nodes == 1 and per_node <= max(self.gpus)
        return is_part or all(gpus % per_node == 0 for gpus in self.gpus)

    def _actor_counts(self, config: PPOConfig, is_asked: bool) -> range:
        """Returns candidates for the number of GPUs (without GPUs: processes) of the actor, best first.
        `is_asked`: True if the user set one of the actor's two size flags."""
        gpus, size = sum(self.gpus), config.vllm.num_gpus
        if not gpus:
            return range(1, max(2, total(self.nodes, "CPU")) + 1)
        of_engines = 0
        if not config.engines_colocated:
            of_engines = size if is_asked else max(size, gpus - gpus // 2)
            if "vllm.num_engines" in self.explicit:
                of_engines = config.num_engines * size
        return range(max(1, gpus - of_engines), 0, -1)
