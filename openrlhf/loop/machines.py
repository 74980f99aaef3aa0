"""Flags that follow from the machines of a run: how many ranks and engines there are."""

import sys
from collections.abc import Sequence
from typing import Any, cast

from openrlhf.cluster.layout import Nodes, compute_layout, demands, described, table, total
from openrlhf.cluster.planner import least_tensor_parallel_size, suitable_flags
from openrlhf.config.choices import VLLM_LORA_RANKS
from openrlhf.config.command import Explicit
from openrlhf.config.fields import flag_values, with_values
from openrlhf.config.ppo import ACTOR_FLAG, PPOConfig
from openrlhf.hub import choose_hub
from openrlhf.memory.sizes import ITEM_BYTES
from openrlhf.nvidia_smi import gpu_bytes
from openrlhf.observability.waits import checking


def plan(config: PPOConfig, cluster: Sequence[int]) -> str:
    """Returns the table of the run's placement (`--print_plan`). Raises UsageError if the run does not fit.
    `cluster`: number of GPUs of each node; empty for the cluster that the run would join, or this machine."""
    return table(compute_layout(config, _nodes(cluster)))


def _nodes(cluster: Sequence[int]) -> Nodes:
    if cluster:
        return described(cluster)
    from openrlhf.cluster.launch import available_nodes  # imports Ray

    return available_nodes()


def resolve(config: PPOConfig, explicit: Explicit, cluster: Sequence[int] = ()) -> dict[str, Any]:
    """Returns values for unset flags, chosen for the available resources and the model. `cluster`: as in
    `plan`."""
    suitable = _suitable if config.placement == "auto" else rank_counts
    chosen: dict[str, Any] = dict(suitable(config, explicit, cluster))
    if "vllm.lora_sync" not in explicit and adapts_apart(config):
        chosen["vllm.lora_sync"] = "adapter"
    return chosen


def _suitable(config: PPOConfig, explicit: Explicit, cluster: Sequence[int]) -> dict[str, Any]:
    with checking():
        nodes = _nodes(cluster)
        chosen = suitable_flags(config, explicit, nodes, _engine_size(config, explicit, cluster))
    gpus, used = total(nodes, "GPU"), sum(demands(with_values(config, chosen)).values())
    if used < gpus:
        print(f"note: --placement auto: {gpus - used} of {gpus} GPUs stay idle", file=sys.stderr, flush=True)
    return chosen


def _engine_size(config: PPOConfig, explicit: Explicit, cluster: Sequence[int]) -> int:
    """Returns the number of GPUs that an engine's weights need on this machine. Returns the value of
    --vllm.tensor_parallel_size if the flag is set, if `cluster` describes another machine, or if the GPUs'
    memory is unknown."""
    size = config.vllm.tensor_parallel_size
    if cluster or "vllm.tensor_parallel_size" in explicit or (memory := gpu_bytes()) is None:
        return size
    from openrlhf.models.sizes import model_size  # imports transformers

    path, item = config.actor.model_name_or_path, ITEM_BYTES[config.ds.param_dtype]
    try:
        weights = model_size(path, ACTOR_FLAG, images=config.reads_images).weight_bytes(item)
    except ValueError:  # there is no such model; the checks report it
        return size
    return least_tensor_parallel_size(weights // config.vllm.pipeline_parallel_size, memory)


def rank_counts(config: PPOConfig, explicit: Explicit, cluster: Sequence[int] = ()) -> dict[str, int]:
    """Returns values of `num_gpus_per_node` for roles whose flag is unset and whose default exceeds the GPUs
    of the smallest node: the number of these GPUs, or 1 without GPUs. `cluster`: as in `plan`."""
    keys = [f"{role}.num_gpus_per_node" for role in config.own_placements]
    if all(key in explicit for key in keys):
        return {}
    with checking():
        most = max(1, min((int(n["GPU"]) for n in _nodes(cluster) if n.get("GPU", 0) >= 1), default=1))
    values = flag_values(config)
    return {key: most for key in keys if key not in explicit and cast(int, values[key]) > most}


def adapts_apart(config: PPOConfig) -> bool:
    """Returns whether merged adapters would be rounded, and vLLM can apply them apart for this model."""
    is_rounded = 0 < config.ds.lora.rank <= VLLM_LORA_RANKS[-1] and config.ds.param_dtype != "fp32"
    if not is_rounded or config.rollout.engine != "vllm" or config.reads_images or config.vllm.speculative:
        return False
    from openrlhf.backends.vllm.support import adapts_all  # imports transformers

    choose_hub(config.use_ms)
    try:
        return adapts_all(config.actor.model_name_or_path, ACTOR_FLAG)
    except ValueError:  # there is no such model; the checks report it
        return False
