"""Checks of the flags of `batch_inference` and `interactive_chat` against each other."""

import os
from collections.abc import Iterator

from openrlhf.config import checks
from openrlhf.config.checks import Rule, Unread, needs
from openrlhf.config.command import Explicit, Problem
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig
from openrlhf.errors import ErrorCode


def batch_inference_problems(config: BatchInferenceConfig, explicit: Explicit) -> list[Problem]:
    return checks.first_of_each(
        [
            *checks.modelscope(config),
            *checks.required(config, "task", "model.model_name_or_path", "data.dataset", "output_path"),
            *checks.local_models(config, "model.model_name_or_path"),
            *checks.local_datasets(config, ("data.dataset", "data.dataset_probs")),
            *checks.template(config, explicit),
            *checks.broken(config, RULES),
            *_ranks(config),
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
            *checks.broken(config, CHAT_RULES),
            *checks.attention_packages(config.ds),
            *_engine(config, explicit),
            *checks.unread(config, explicit, SAMPLING_UNREAD + CHAT_UNREAD),
        ]
    )


SAMPLING_UNREAD = (
    *checks.TEMPLATE_UNREAD,
    Unread(
        "rollout.temperature rollout.top_p",
        lambda c: c.rollout.greedy,
        "with --rollout.greedy, which takes the most likely token",
    ),
    needs("csft.enable", "csft.prompt"),
)
BATCH_INFERENCE_UNREAD = (
    Unread(
        "rollout. csft. iter data.prompt_max_len",
        lambda c: c.task == "rm",
        "with task rm, which samples nothing",
    ),
    Unread(
        "reward. data.output_key data.max_len ds.value_head_prefix",
        lambda c: c.task != "rm",
        "because only task rm scores answers",
    ),
    Unread(
        "reward.template",
        lambda c: c.post_processor != "csft",
        "without --post_processor csft, which writes rewards into inputs",
    ),
    Unread("rollout.batch_size", lambda c: c.iter is None, "without --iter"),
    Unread(
        "ds.zero_stage",
        lambda c: True,
        "because each rank holds the whole model; task generate_vllm spreads it over GPUs "
        "(vllm.tensor_parallel_size)",
    ),
    Unread(
        "vllm.",
        lambda c: c.engine != "vllm",
        "because no vLLM engine starts (task, rollout.engine)",
    ),
    Unread(
        "train.micro_batch_size ds.attn_implementation train.full_determinism_enable",
        lambda c: c.engine == "vllm",
        "because vLLM forms its own batches and chooses its own kernels",
    ),
)
CHAT_UNREAD = (
    Unread("vllm.", lambda c: c.engine != "vllm", "without --rollout.engine vllm"),
    Unread("ds.attn_implementation", lambda c: c.engine == "vllm", "because vLLM chooses its own kernels"),
)

RULES = (
    Rule(
        "output_path",
        lambda c: os.path.isdir(c.output_path),
        "is a folder; name a .jsonl file",
        ErrorCode.NOT_WRITABLE,
    ),
    Rule(
        "output_path",
        lambda c: c.output_path and not c.output_path.endswith(".jsonl"),
        "must end in .jsonl, because commands recognise the format by it",
        ErrorCode.INVALID_VALUE,
    ),
    Rule(
        "output_path",
        lambda c: (
            c.output_path
            and os.path.abspath(c.output_path) in map(os.path.abspath, c.data.dataset.split(","))
        ),
        "is the dataset that is read; name another file",
    ),
    Rule(
        "post_processor",
        lambda c: c.post_processor and c.task in ("generate", "generate_vllm"),
        lambda c: f"needs rewards, and task {c.task} gives none; use it with --task rm on the answers",
    ),
    *(
        Rule(
            "reward.template",
            lambda c, place=place: c.post_processor == "csft" and place not in c.reward.template,
            f"does not contain {place}; add it",
            ErrorCode.INVALID_VALUE,
        )
        for place in ("{input}", "{reward}")
    ),
    Rule(
        "rollout.n_samples_per_prompt",
        lambda c: c.task != "rm" and c.rollout.greedy and c.rollout.n_samples_per_prompt > 1,
        "rollout.greedy gives the same answer every time; remove one of the two",
    ),
)
CHAT_RULES = (
    Rule(
        "ta_prompt",
        lambda c: c.ta_prompt is not None and not os.path.isfile(c.ta_prompt),
        lambda c: f"{checks.missing(c.ta_prompt, c.ta_prompt)}; the flag takes a file with the text",
        ErrorCode.NOT_FOUND,
    ),
    Rule(
        "rollout.max_new_tokens",
        lambda c: (c.rollout.max_new_tokens or 0) >= c.data.max_len,
        lambda c: f"leaves no room for a prompt in data.max_len {c.data.max_len}; raise data.max_len",
    ),
)


def _ranks(config: BatchInferenceConfig) -> Iterator[Problem]:
    """Refuses vLLM on several ranks of a launcher."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if config.engine == "vllm" and ranks != "1":
        yield Problem(
            "rollout.engine" if config.rollout.engine else "task",
            f"vLLM needs one process, and the launcher started {ranks}; start the command with python.\n"
            "--vllm.tensor_parallel_size sets the number of GPUs",
        )


def _engine(config: BatchInferenceConfig | ChatConfig, explicit: Explicit) -> Iterator[Problem]:
    """Refuses features that the engine does not have, and vLLM where it is not installed."""
    yield from checks.bitsandbytes(config.ds.load_in_4bit)
    if config.engine == "transformers":
        if "rollout.engine" in explicit and (config.vllm.tensor_parallel_size or 1) > 1:
            text = "rollout.engine transformers does not support it; remove it, or use vllm"
            yield Problem("vllm.tensor_parallel_size", text, ErrorCode.UNSUPPORTED)
        return
    if config.ds.load_in_4bit:
        yield Problem(
            "ds.load_in_4bit",
            "vLLM does not quantise to NF4. Use --rollout.engine transformers, or without this flag a model\n"
            "that is quantised for vLLM (AWQ or GPTQ, see quantization_config in its config.json)",
            ErrorCode.UNSUPPORTED,
        )
    yield from checks.vllm("rollout.engine" if config.rollout.engine else "task")
