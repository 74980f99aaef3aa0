"""Joining or starting a Ray cluster, and asking it whether a run fits before anything is loaded."""

import os
from collections.abc import Mapping
from typing import Any

import ray

from openrlhf.config.ppo import PPOConfig

OBJECT_STORE_BYTES = 512 << 20
"""On a machine without a GPU. Ray's default takes a third of the memory."""


def start_ray() -> None:
    """Join the cluster that RAY_ADDRESS names or that runs on this machine, else start one here."""
    if ray.is_initialized():
        return
    quiet = {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    options: dict[str, Any] = {
        "runtime_env": {"env_vars": quiet},
        "log_to_driver": True,
        "logging_level": "ERROR",
    }
    if "RAY_ADDRESS" not in os.environ:
        import torch

        options |= {"include_dashboard": torch.cuda.is_available()}
        if not torch.cuda.is_available():
            options |= {"object_store_memory": OBJECT_STORE_BYTES}
    ray.init(**options)


def cluster_has_gpus() -> bool:
    return ray.cluster_resources().get("GPU", 0) > 0


def resource_problems(config: PPOConfig, resources: Mapping[str, float]) -> list[str]:
    """One text for each flag that asks for more than the cluster has."""
    demands = _demands(config)
    gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    if gpus == 0:
        return [
            f"{flag} asks for {count} ranks; the cluster has no GPU and {cores} CPU cores, and a rank needs "
            f"a core. Ask for at most {cores}."
            for flag, count in demands
            if count > max(cores, 2)
        ]
    needed = sum(count for _, count in demands)
    if needed <= gpus:
        return []
    parts = ", ".join(f"{flag} = {count}" for flag, count in demands)
    return [
        f"the run needs {needed} GPUs ({parts}); the cluster has {gpus}.\n"
        f"Ask for fewer, or share them with --train.colocate_all (now {config.train.colocate_all})."
    ]


def _demands(config: PPOConfig) -> list[tuple[str, int]]:
    """(flags, devices) of each role that has devices of its own."""
    demands = [
        (f"--{role}.num_nodes x --{role}.num_gpus_per_node", home.num_workers)
        for role, home in config.homes.items()
        if home.host is None
    ]
    if not config.train.colocate_all:
        engine_gpus = config.num_engines * config.vllm.tensor_parallel_size
        demands.append(("--vllm.num_engines x --vllm.tensor_parallel_size", engine_gpus))
    return demands
