"""The commands that use trained models: their flags are read, and then their modules imported."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from openrlhf.api import (
    BATCH_INFERENCE,
    CHAT,
    LORA_COMBINER,
    MODEL_FLAG,
    SERVE_RM,
    BatchInferenceConfig,
    check_launcher,
    choose_hub,
    parse,
    short_errors,
)
from openrlhf.tools.command_line.arguments import fitting_lengths, run

SERVED_FLAG = "--reward.model_name_or_path"

chat_lengths = partial(fitting_lengths, flag=MODEL_FLAG, keys=["data.max_len"])
served_lengths = partial(fitting_lengths, flag=SERVED_FLAG, keys=["data.max_len"])


def batch_inference(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        config = parse(BATCH_INFERENCE, argv, resolve=lengths).config
        check_launcher()
        choose_hub(config.use_ms)
        run("openrlhf.tools.serve.batch_inference:run", config)
        if config.engine != "vllm":
            run("openrlhf.api:leave_distributed")


def lengths(config: BatchInferenceConfig, *args: Any) -> dict[str, int]:
    return fitting_lengths(config, *args, flag=MODEL_FLAG, keys=length_keys(config))


def length_keys(config: BatchInferenceConfig) -> tuple[str, ...]:
    """Returns the flags whose sum is the length of the longest sequence."""
    return ("data.max_len",) if config.task == "rm" else ("data.prompt_max_len", "rollout.max_new_tokens")


def chat(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        invocation = parse(CHAT, argv, resolve=chat_lengths)
        choose_hub(invocation.config.use_ms)
        run("openrlhf.tools.serve.interactive_chat:run", invocation.config, invocation.explicit)


def serve_rm(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        config = parse(SERVE_RM, argv, resolve=served_lengths).config
        choose_hub(config.use_ms)
        run("openrlhf.tools.serve.serve_rm:run", config)


def lora_combiner(argv: Sequence[str] | None = None) -> None:
    config = parse(LORA_COMBINER, argv).config
    with short_errors():
        run("openrlhf.tools.serve.lora_combiner:run", config)
