"""vLLM's configuration for an engine's options on a GPU of 80 GB. No model is loaded."""

import asyncio
from typing import Any
from unittest.mock import patch

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from openrlhf.backends.rollout import EngineOptions
from openrlhf.backends.vllm.engine import VLLMEngine

defaults = AsyncEngineArgs.get_batch_defaults


def on_gpu(args: AsyncEngineArgs, world_size: int) -> Any:
    """Makes vLLM choose its own defaults for another device than this machine's."""
    with (
        patch.object(current_platform, "is_cpu", lambda: False),
        patch.object(current_platform, "get_device_total_memory", lambda: 80 << 30),
        patch.object(current_platform, "get_device_name", lambda: "NVIDIA H100"),
    ):
        return defaults(world_size)


class Made(Exception):
    pass


def config_of(options: EngineOptions, free_fraction: float | None) -> Any:
    def stop(args: Any, **given: Any) -> None:
        raise Made(args.create_engine_config(**given))

    with (
        patch.object(AsyncEngineArgs, "get_batch_defaults", on_gpu),
        patch.object(AsyncLLM, "from_engine_args", stop),
    ):
        try:
            asyncio.run(VLLMEngine(options).start(free_fraction))
        except Made as made:
            return made.args[0]


def main(spec: dict) -> dict:
    config = config_of(EngineOptions(**spec["options"]), spec["free_fraction"])
    return {
        "head": str(config.model_config.head_dtype),
        "sequences": config.scheduler_config.max_num_seqs,
        "tokens": config.scheduler_config.max_num_batched_tokens,
        "memory": config.cache_config.gpu_memory_utilization,
    }
