"""Checks of the flags of `batch_inference` and `interactive_chat` against each other."""

import os
from collections.abc import Iterator

from openrlhf.config import checks
from openrlhf.config.command import Explicit, Problem
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig
from openrlhf.config.owned_options import owned_options
from openrlhf.errors import ErrorCode


def batch_inference_problems(config: BatchInferenceConfig, explicit: Explicit) -> list[Problem]:
    return checks.first_of_each(
        [
            *checks.modelscope(config),
            *checks.required(config, "task", "model.model_name_or_path", "data.dataset", "output_path"),
            *checks.local_models(config, "model.model_name_or_path"),
            *checks.local_datasets(config, ("data.dataset", "data.dataset_probs")),
            *checks.template(config, explicit),
            *_output(config),
            *_ranks(config),
            *checks.attention_packages(config.ds),
            *_engine(config, explicit),
            *checks.remark_ignored(config, explicit, _batch_inference_ignored(config)),
        ]
    )


def chat_problems(config: ChatConfig, explicit: Explicit) -> list[Problem]:
    return checks.first_of_each(
        [
            *checks.modelscope(config),
            *checks.required(config, "model.model_name_or_path"),
            *checks.local_models(config, "model.model_name_or_path"),
            *checks.template(config, explicit),
            *_conversation(config),
            *checks.attention_packages(config.ds),
            *_engine(config, explicit),
            *checks.remark_ignored(config, explicit, _chat_ignored(config)),
        ]
    )


def _sampling_ignored(c: BatchInferenceConfig | ChatConfig) -> Iterator[checks.IgnoredFlags]:
    yield from checks.template_ignored(c)
    yield from checks.needs(c, {"csft.enable": "csft.prompt"})
    if c.rollout.greedy:
        keys = "rollout.temperature rollout.top_p"
        yield keys, "with --rollout.greedy, which takes the most likely token"


def _batch_inference_ignored(c: BatchInferenceConfig) -> Iterator[checks.IgnoredFlags]:
    yield from _sampling_ignored(c)
    if c.task == "rm":
        yield "rollout. csft. iter data.prompt_max_len", "with task rm, which samples nothing"
    else:
        keys = "reward. data.output_key data.max_len ds.value_head_prefix"
        yield keys, "because only task rm scores answers"
    if c.post_processor != "csft":
        yield "reward.template", "without --post_processor csft, which writes rewards into inputs"
    if c.iter is None:
        yield "rollout.batch_size", "without --iter"
    why = "because each rank holds the whole model; task generate_vllm spreads it over GPUs "
    yield "ds.zero_stage", f"{why}(vllm.tensor_parallel_size)"
    if c.engine != "vllm":
        yield "vllm.", "because no vLLM engine starts (task, rollout.engine)"
    else:
        keys = "train.micro_batch_size ds.attn_implementation train.full_determinism_enable"
        yield keys, "because vLLM forms its own batches and chooses its own kernels"


def _chat_ignored(c: ChatConfig) -> Iterator[checks.IgnoredFlags]:
    yield from _sampling_ignored(c)
    if c.engine != "vllm":
        yield "vllm.", "without --rollout.engine vllm"
    else:
        yield "ds.attn_implementation", "because vLLM chooses its own kernels"


def _output(c: BatchInferenceConfig) -> Iterator[Problem]:
    """Checks the file to write and what is written."""
    key, file = "output_path", c.output_path
    if problem := checks.unexpanded(file):
        yield Problem(key, problem, ErrorCode.NOT_WRITABLE)
    if os.path.isdir(file):
        yield Problem(key, "is a folder; name a .jsonl file", ErrorCode.NOT_WRITABLE)
    if file and not file.endswith(".jsonl"):
        text = "must end in .jsonl, because commands recognise the format by it"
        yield Problem(key, text, ErrorCode.INVALID_VALUE)
    if file and os.path.abspath(file) in map(os.path.abspath, checks.split_spec(c.data.dataset)):
        yield Problem(key, "is the dataset that is read; name another file")
    if c.post_processor and c.task in ("generate", "generate_vllm"):
        text = f"needs rewards, and task {c.task} gives none; use it with --task rm on the answers"
        yield Problem("post_processor", text)
    for place in ("{input}", "{reward}"):
        if c.post_processor == "csft" and place not in c.reward.template:
            yield Problem("reward.template", f"does not contain {place}; add it", ErrorCode.INVALID_VALUE)
    if c.task != "rm" and c.rollout.greedy and c.rollout.n_samples_per_prompt > 1:
        text = "rollout.greedy gives the same answer every time; remove one of the two"
        yield Problem("rollout.n_samples_per_prompt", text)


def _conversation(c: ChatConfig) -> Iterator[Problem]:
    if c.ta_prompt is not None and not os.path.isfile(c.ta_prompt):
        text = f"{checks.missing(c.ta_prompt, c.ta_prompt)}; the flag takes a file with the text"
        yield Problem("ta_prompt", text, ErrorCode.NOT_FOUND)
    if (c.rollout.max_new_tokens or 0) >= c.data.max_len:
        text = f"leaves no room for a prompt in data.max_len {c.data.max_len}; raise data.max_len"
        yield Problem("rollout.max_new_tokens", text)


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
    yield from owned_options(config)
    yield from checks.vllm("rollout.engine" if config.rollout.engine else "task")
