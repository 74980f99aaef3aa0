"""Checks of the flags of `batch_inference` and `interactive_chat` against each other."""

import os
from collections.abc import Iterator

from openrlhf.config import checks
from openrlhf.config.checks import Unread
from openrlhf.config.command import Explicit, Problem
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig


def batch_inference_problems(config: BatchInferenceConfig, explicit: Explicit) -> list[Problem]:
    return checks.first_of_each(
        [
            *checks.modelscope(config),
            *checks.required(config, "task", "model.model_name_or_path", "data.dataset", "output_path"),
            *checks.local_models(config, "model.model_name_or_path"),
            *checks.local_datasets(config, ("data.dataset", "data.dataset_probs")),
            *checks.template(config, explicit),
            *_output(config),
            *_processing(config),
            *_answers(config),
            *checks.attention_packages(config.ds),
            *_engine(config, explicit),
            *checks.unread(config, explicit, SAMPLING_UNREAD + BATCH_INFERENCE_UNREAD),
        ]
    )


def chat_problems(config: ChatConfig, explicit: Explicit) -> list[Problem]:
    return checks.first_of_each(
        [
            *checks.modelscope(config),
            *checks.required(config, "model.model_name_or_path"),
            *checks.local_models(config, "model.model_name_or_path"),
            *checks.template(config, explicit),
            *_initial_prompt(config),
            *_room(config),
            *checks.attention_packages(config.ds),
            *_engine(config, explicit),
            *checks.unread(config, explicit, SAMPLING_UNREAD + CHAT_UNREAD),
        ]
    )


SAMPLING_UNREAD = (
    *checks.TEMPLATE_UNREAD,
    Unread(
        keys=("rollout.temperature", "rollout.top_p"),
        when=lambda c: c.rollout.greedy,
        why="rollout.greedy takes the most likely token",
    ),
    Unread(keys=("csft.prompt",), when=lambda c: not c.csft.enable, why="csft.enable is off"),
)
BATCH_INFERENCE_UNREAD = (
    Unread(
        keys=("rollout.", "csft.", "iter", "data.prompt_max_len"),
        when=lambda c: c.task == "rm",
        why="task rm samples nothing",
    ),
    Unread(
        keys=("reward.", "data.output_key", "data.max_len", "ds.value_head_prefix"),
        when=lambda c: c.task != "rm",
        why="only task rm scores answers",
    ),
    Unread(
        keys=("reward.template",),
        when=lambda c: c.post_processor != "csft",
        why="only post_processor csft writes rewards into inputs",
    ),
    Unread(keys=("rollout.batch_size",), when=lambda c: c.iter is None, why="there is no iter"),
    Unread(
        keys=("ds.zero_stage",),
        when=lambda c: True,
        why="each rank holds the whole model; task generate_vllm spreads it over GPUs "
        "(vllm.tensor_parallel_size)",
    ),
    Unread(
        keys=("vllm.",),
        when=lambda c: c.engine != "vllm",
        why="no vLLM engine starts (task, rollout.engine)",
    ),
    Unread(
        keys=("train.micro_batch_size", "ds.attn_implementation", "train.full_determinism_enable"),
        when=lambda c: c.engine == "vllm",
        why="vLLM makes its own batches and chooses its own kernels",
    ),
)
CHAT_UNREAD = (
    Unread(
        keys=("vllm.",),
        when=lambda c: c.engine != "vllm",
        why="rollout.engine is transformers",
    ),
    Unread(
        keys=("ds.attn_implementation",),
        when=lambda c: c.engine == "vllm",
        why="vLLM chooses its own kernels",
    ),
)


def _output(config: BatchInferenceConfig) -> Iterator[Problem]:
    path = config.output_path
    if not path:
        return
    if os.path.isdir(path):
        yield Problem("output_path", "is a folder; name a .jsonl file")
    elif not path.endswith(".jsonl"):
        yield Problem("output_path", "must end in .jsonl: by its ending the commands that read it know it")
    elif os.path.abspath(path) in map(os.path.abspath, config.data.dataset.split(",")):
        yield Problem("output_path", "is the dataset that is read; name another file")


def _processing(config: BatchInferenceConfig) -> Iterator[Problem]:
    if config.post_processor and config.task in ("generate", "generate_vllm"):
        yield Problem(
            "post_processor",
            f"works on rewards, and task {config.task} gives none; use it with --task rm on its output",
        )
    if config.post_processor == "csft":
        for place in ("{input}", "{reward}"):
            if place not in config.reward.template:
                yield Problem("reward.template", f"has no {place}")


def _answers(config: BatchInferenceConfig) -> Iterator[Problem]:
    rollout, ranks = config.rollout, os.environ.get("WORLD_SIZE", "1")
    if config.task == "rm":
        return
    if rollout.greedy and rollout.n_samples_per_prompt > 1:
        yield Problem(
            "rollout.n_samples_per_prompt",
            "rollout.greedy gives the same answer every time; remove one of the two",
        )
    if config.engine == "vllm" and ranks != "1":
        yield Problem(
            "rollout.engine" if config.rollout.engine else "task",
            f"is one process, but the launcher started {ranks}; start it with python.\n"
            "vllm.tensor_parallel_size says how many GPUs it takes",
        )


def _engine(config: BatchInferenceConfig | ChatConfig, explicit: Explicit) -> Iterator[Problem]:
    """Refuses what the engine that samples does not have, and vLLM where it is not installed."""
    yield from checks.bitsandbytes(config.ds.load_in_4bit)
    if config.engine == "transformers":
        if "rollout.engine" in explicit and (config.vllm.tensor_parallel_size or 1) > 1:
            yield Problem(
                "vllm.tensor_parallel_size", "--rollout.engine transformers cannot; remove one of them"
            )
        return
    if config.ds.load_in_4bit:
        yield Problem(
            "ds.load_in_4bit",
            "vLLM has no NF4 weights; use --rollout.engine transformers, or without this flag a model that\n"
            "was saved in four bits for vLLM (AWQ or GPTQ, of which its config.json tells)",
        )
    yield from checks.vllm("rollout.engine" if config.rollout.engine else "task")


def _initial_prompt(config: ChatConfig) -> Iterator[Problem]:
    if config.ta_prompt is not None and not os.path.isfile(config.ta_prompt):
        yield Problem("ta_prompt", checks.missing(config.ta_prompt, config.ta_prompt))


def _room(config: ChatConfig) -> Iterator[Problem]:
    new = config.rollout.max_new_tokens
    if new is not None and new >= config.data.max_len:
        yield Problem(
            "rollout.max_new_tokens", f"leaves no room for a prompt in data.max_len {config.data.max_len}"
        )
