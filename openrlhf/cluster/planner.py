"""Chooses placement flags for a cluster (`--placement auto`). They decide where things run, never what is
learned.

All models share their GPUs. Engines share them, too (hybrid engine); with train.async_enable engines have
half of all GPUs for themselves. Flags that the user set are not changed."""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from openrlhf.cluster.layout import Nodes, resource_problems, total
from openrlhf.config.checks import uneven_batch
from openrlhf.config.fields import flag_values, with_values
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

    def chosen(config: PPOConfig, values: Mapping[str, Any]) -> PPOConfig:
        return with_values(config, {key: value for key, value in values.items() if key not in explicit})

    def sized(shape: tuple[int, int]) -> PPOConfig:
        """Returns the configuration with this shape of the actor, and engines on the other GPUs."""
        config = chosen(shared, dict(zip(SIZE, shape, strict=True)))
        if config.engines_colocated or not any(gpus):
            return config
        size = config.vllm.num_gpus
        whole, left = sum(n // size for n in gpus), (sum(gpus) - config.actor.num_gpus) // size
        return chosen(config, {"vllm.num_engines": max(1, min(whole, left))})

    gpus = [int(node.get("GPU", 0)) for node in nodes]
    shared = chosen(config, {"train.colocate_all": True, "vllm.tensor_parallel_size": tensor_parallel_size})
    tried = map(sized, _actor_shapes(shared, explicit, gpus, total(nodes, "CPU")))
    first = next(tried, shared)
    placed = next((each for each in chain([first], tried) if _suits(each, nodes)), first)
    if placed.engines_colocated and any(gpus):  # they take turns
        placed = chosen(placed, {"vllm.enable_sleep": True})
        asleep = chosen(placed, {"ds.enable_sleep": not placed.ds.adam_offload})
        placed = placed if any(optimizer_sleep(asleep)) else asleep
    before, after = flag_values(config), flag_values(placed)
    return {key: value for key, value in after.items() if value != before[key]}


def least_tensor_parallel_size(weight_bytes: int, gpu_bytes: int) -> int:
    """Returns the smallest power of two of GPUs such that an engine's weights fit into WEIGHTS_FRACTION of
    the memory of each. Both arguments are in bytes."""
    size = 1
    while weight_bytes > size * WEIGHTS_FRACTION * gpu_bytes:
        size *= 2
    return size


def _suits(config: PPOConfig, nodes: Nodes) -> bool:
    """Returns True if the configuration passes the checks of placement."""
    uneven = uneven_batch(config, config.train.batch_size, config.data_parallel_size)
    torn = config.actor.num_gpus % config.placements["actor"].mesh.replica
    return not (uneven or torn or any(engines_beside_actor(config)) or resource_problems(config, nodes))


def _actor_shapes(
    config: PPOConfig, explicit: Container[str], gpus: Sequence[int], cores: int
) -> Iterator[tuple[int, int]]:
    """Yields candidates for the actor's shape, (nodes, GPUs per node), best first: for each number of GPUs
    the one with the fewest nodes that has what the user set, or else is a part of one node or divides every
    node evenly. `gpus`: those of each node."""
    asked = (config.actor.num_nodes, config.actor.num_gpus_per_node)
    fixed = [i for i, key in enumerate(SIZE) if key in explicit]
    if len(fixed) == len(SIZE):
        yield asked
        return

    def is_possible(shape: tuple[int, int]) -> bool:
        num_nodes, size = shape
        if fixed:
            return all(shape[i] == asked[i] for i in fixed)
        return (num_nodes == 1 and size <= max(gpus)) or all(count % size == 0 for count in gpus)

    for count in _actor_counts(config, explicit, sum(gpus), cores, is_asked=bool(fixed)):
        shapes = ((n, count // n) for n in range(1, count + 1) if count % n == 0)
        yield from islice(filter(is_possible, shapes), 1)


def _actor_counts(
    config: PPOConfig, explicit: Container[str], gpus: int, cores: int, *, is_asked: bool
) -> range:
    """Returns candidates for the number of GPUs (without GPUs: processes) of the actor, best first.
    `is_asked`: True if the user set one of the actor's two size flags."""
    if not gpus:
        return range(1, max(2, cores) + 1)
    of_engines, size = 0, config.vllm.num_gpus
    if not config.engines_colocated:
        of_engines = size if is_asked else max(size, gpus - gpus // 2)
        if "vllm.num_engines" in explicit:
            of_engines = config.num_engines * size
    return range(max(1, gpus - of_engines), 0, -1)
