"""Batch inference: answers a dataset's prompts, or scores its answers (`openrlhf batch_inference`). The tasks
generate and rm also run under torchrun or deepspeed, as the module openrlhf.cli.batch_inference."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from openrlhf.api import (
    DEVICE_TYPE,
    MODEL_FLAG,
    BatchInferenceConfig,
    ChatConfig,
    EngineOptions,
    ErrorCode,
    ProcessMesh,
    Progress,
    RunError,
    SamplingParams,
    build_answers,
    build_questions,
    check_columns,
    check_room,
    check_vllm_runs,
    checking,
    counted,
    current_device,
    engine_class,
    flag_values,
    format_duration,
    format_number,
    init_distributed,
    load_config,
    load_generator,
    load_rows,
    load_run_tokenizer,
    log_stops,
    missing_embeddings,
    seed_everything,
    stop_token_ids,
    waiting,
)
from openrlhf.api import inference_fingerprint as fingerprint
from openrlhf.api import inference_iteration as iteration
from openrlhf.tools.serve.answering import (
    Recorder,
    answer_with_engine,
    answer_with_transformers,
    requests_for,
    score,
)
from openrlhf.tools.serve.flags import length_keys
from openrlhf.tools.serve.result_file import (
    ResultFile,
    best_and_worst,
    check_origin,
    finished,
    keep_best,
    merge,
    num_truncated,
    write_origin,
    write_rewards,
    write_rows,
)
from openrlhf.tools.serve.scoring import load_normalized

Work = Callable[[Sequence[Any], "Recorder"], None]
"""A function that processes items of work and records their results."""

ONLY_SPEED = (
    *("local_rank", "output_path", "train.micro_batch_size", "data.dataset"),
    *("vllm.tensor_parallel_size", "vllm.max_num_seqs", "vllm.enable_prefix_caching", "vllm.enforce_eager"),
    *("vllm.gpu_memory_utilization", "vllm.kv_cache_gb"),
)
"""Flags that may change when a stopped run is continued. The rows of the dataset must stay the same
(`origin`)."""


def run(config: BatchInferenceConfig) -> None:
    """Runs the task and writes `output_path`. Every rank calls it; the process group stays open."""
    with checking():
        check(config)
    tokenizer = load_run_tokenizer(config)
    if config.task != "rm":
        log_stops(config, tokenizer)
    work, made_from = build_work(config, tokenizer)
    check_origin(config.raw_path, config.meta_path, made_from)
    done = finished(config.raw_path)
    pending = [item for item in work if item.key not in done]
    rank, world = _join_ranks(config)  # a barrier: all ranks have read the file before one writes
    mine, title = pending[rank::world], "score" if config.task == "rm" else "generate"
    title += f" (rank {rank} of {world})" if world > 1 else ""
    with Progress(show=rank == 0) as progress:
        if done:
            progress.message(f"{config.raw_path} already has {len(done)} of {len(work)} rows")
        if rank == 0:
            write_origin(config.meta_path, made_from)
        recorder = Recorder()
        try:
            if pending:
                with ExitStack() as stack:
                    with waiting(
                        "loading the model", key=f"{config.model.model_name_or_path} {_loader(config)}"
                    ):
                        do = stack.enter_context(LOADERS[_loader(config)](config, tokenizer))
                    progress.start(0)
                    results = stack.enter_context(ResultFile(config.raw_path, rank))
                    phase = stack.enter_context(progress.phase(title, len(mine)))
                    do(mine, recorder.begin(results, phase))
            with progress.phase("other ranks"):
                num_tokens = _sum_over_ranks(config, recorder.num_tokens)
            if rank == 0:
                _finish(config, progress, len(work), num_tokens, recorder.elapsed)
        except KeyboardInterrupt:
            progress.message(
                f"stopped; run the same command again to continue from the rows in {config.raw_path}"
            )
            raise


def check(config: BatchInferenceConfig) -> None:
    """Checks the dataset and the model's files before anything is loaded. Raises UsageError for problems."""
    check_columns(config.data.dataset, **_rows(config))
    check_answering_model(config, length_keys(config))


def check_answering_model(config: BatchInferenceConfig | ChatConfig, lengths: Sequence[str]) -> None:
    """Raises UsageError if the model is missing, if its context is shorter than the sum of the flags
    `lengths`, or if the engine is vLLM and does not support it."""
    path, values = config.model.model_name_or_path, flag_values(config)
    model_config = load_config(path, MODEL_FLAG)
    check_room(model_config, config, *lengths, path=path)
    if config.engine == "vllm":
        check_vllm_runs(
            model_config,
            flag=MODEL_FLAG,
            path=path,
            dtype=config.ds.param_dtype,
            max_len=sum(values[key] for key in lengths),
            on_cpu=DEVICE_TYPE == "cpu",
            tensor_parallel_size=config.vllm.tensor_parallel_size or 1,
        )


def build_work(
    config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the items of work, each with its `key`, and the `origin` of their results."""
    data, rollout = config.data, config.rollout
    probs, most, seed = data.dataset_probs, data.max_samples, config.train.seed
    rows = load_rows(data.dataset, **_rows(config), probs=probs, max_samples=most, seed=seed)
    templates = {
        "input_key": data.input_key,
        "apply_chat_template": data.apply_chat_template,
        "input_template": data.input_template,
        "tools_key": data.tools_key,
        "bad_rows": data.bad_rows,
        "missing": missing_embeddings(tokenizer, load_config(config.model.model_name_or_path, MODEL_FLAG)),
    }
    if config.task == "rm":
        answers = build_answers(
            rows, tokenizer, output_key=data.output_key, max_len=data.max_len, **templates
        )
        return answers, origin(config, fingerprint(answers))
    questions = build_questions(
        rows,
        iteration(len(rows), config.iter, rollout.batch_size),
        tokenizer,
        suffix=config.csft.prompt if config.csft.enable else None,
        max_len=data.prompt_max_len,
        **templates,
    )
    requests = requests_for(questions, num_samples=rollout.n_samples_per_prompt, run_seed=config.train.seed)
    return requests, origin(config, fingerprint(questions))


def origin(config: BatchInferenceConfig, rows: str) -> dict[str, Any]:
    """Returns everything that determines the results: flags, fingerprint of the rows, and size and
    modification time of each weight file."""
    flags = {key: value for key, value in flag_values(config).items() if key not in ONLY_SPEED}
    folder = Path(config.model.model_name_or_path)
    files = sorted(file for ending in ("safetensors", "bin") for file in folder.glob(f"[!.]*.{ending}"))
    weights = {file.name: [(stat := file.stat()).st_size, stat.st_mtime_ns] for file in files}
    return flags | {"rows of the dataset": rows, "weights": weights}


@contextmanager
def _vllm(config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Work]:
    most, caches = config.vllm.max_num_seqs, config.vllm.enable_prefix_caching
    longest = sum(flag_values(config)[key] for key in length_keys(config))
    options = answering_engine(config, longest, enable_prefix_caching=caches, max_num_seqs=most)
    make = engine_class(options)
    os.environ.update(make.environment(options))
    engine = make(options)
    params = build_sampling_params(config, tokenizer, config.rollout.max_new_tokens)
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            yield lambda requests, recorder: runner.run(
                answer_with_engine(engine, requests, params, recorder.answers(tokenizer), concurrency=most)
            )
        finally:
            engine.shutdown()


@contextmanager
def _transformers(config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Work]:
    model = load_answering_model(config).to(current_device()).eval()
    yield lambda requests, recorder: answer_with_transformers(
        model,
        requests,
        build_sampling_params(config, tokenizer, config.rollout.max_new_tokens),
        recorder.answers(tokenizer),
        batch_size=config.train.micro_batch_size,
        pad_token_id=tokenizer.pad_token_id,
    )


@contextmanager
def _scorer(config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Work]:
    path, normalize = config.model.model_name_or_path, config.reward.normalize_enable
    if config.post_processor == "csft":  # normalises rewards itself, at the end
        normalize = False
    model, mean, std = load_normalized(config, path, MODEL_FLAG, normalize=normalize)
    yield lambda answers, recorder: score(
        model,
        answers,
        recorder.scores(mean, std),
        batch_size=config.train.micro_batch_size,
        device=current_device(),
    )


LOADERS = {"vllm": _vllm, "transformers": _transformers, "rm": _scorer}
"""Engine, or task rm -> context manager that loads a model and yields the function that processes work."""


def _loader(config: BatchInferenceConfig) -> str:
    return "rm" if config.task == "rm" else config.engine


def _finish(
    config: BatchInferenceConfig, progress: Progress, num_wanted: int, num_tokens: int, elapsed: float
) -> None:
    rows = merge(config.raw_path)
    if len(rows) != num_wanted:
        text = f"has {counted(len(rows), 'row')} instead of {num_wanted}. Another run may be writing it."
        raise RunError(ErrorCode.IN_USE, text, value=config.raw_path)
    facts = [counted(len(rows), "row")]
    limit = "" if config.task == "rm" else f" at rollout.max_new_tokens {config.rollout.max_new_tokens}"
    facts += [f"{cut} truncated{limit}"] if (cut := num_truncated(rows)) else []
    if config.post_processor:
        processed, remark = _post_process(config, rows)
        write_rows(config.output_path, processed)
        facts.append(f"{config.post_processor}: {counted(len(processed), 'row')}{remark}")
    if num_tokens:
        speed = format_number(num_tokens / max(elapsed, 1e-9))
        facts.append(f"{num_tokens} tokens in {format_duration(elapsed)}, {speed} tok/s")
    progress.message(f"{'; '.join(facts)}; {config.output_path}")


def _post_process(config: BatchInferenceConfig, rows: list[dict]) -> tuple[list[dict], str]:
    if config.post_processor == "rs":
        kept = keep_best(rows)
        return kept, f", {cut} of them truncated" if (cut := num_truncated(kept)) else ""
    if config.post_processor == "csft":
        return write_rewards(rows, config.reward.template, normalize=config.reward.normalize_enable), ""
    pairs, dropped = best_and_worst(rows)
    return pairs, f" ({dropped} inputs dropped: all their rewards are equal)" if dropped else ""


def load_answering_model(config: BatchInferenceConfig | ChatConfig) -> Any:
    return load_generator(
        config.model.model_name_or_path,
        flag=MODEL_FLAG,
        dtype=config.ds.param_dtype,
        attention=config.ds.attn_implementation,
        max_len=config.data.max_len,
        in_4bit=config.ds.load_in_4bit,
    )


def answering_engine(config: BatchInferenceConfig | ChatConfig, max_len: int, **more: Any) -> EngineOptions:
    path, on_gpu = config.model.model_name_or_path, DEVICE_TYPE == "cuda"
    return EngineOptions.of(config, model=path, model_flag=MODEL_FLAG, max_len=max_len, on_gpu=on_gpu, **more)


def build_sampling_params(
    config: BatchInferenceConfig | ChatConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> SamplingParams:
    """Returns the sampling options of answers with at most `max_tokens` tokens, without a seed."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids(config.model.model_name_or_path, tokenizer),
        temperature=0.0 if rollout.greedy else rollout.temperature,
        top_p=1.0 if rollout.greedy else rollout.top_p,
        repetition_penalty=rollout.repetition_penalty,
        detokenize=False,
        skip_special_tokens=False,
    )


def _rows(config: BatchInferenceConfig) -> dict[str, Any]:
    """Returns the arguments by which the dataset is checked and loaded."""
    data = config.data
    columns = {"--data.input_key": data.input_key, "--data.tools_key": data.tools_column}
    return {
        "flag": "--data.dataset",
        "required_columns": columns | ({"--data.output_key": data.output_key} if config.task == "rm" else {}),
        "split": data.dataset_split,
        "bad_rows": data.bad_rows,
        "row_func": data.row_func,
    }


def _join_ranks(config: BatchInferenceConfig) -> tuple[int, int]:
    """Waits for all ranks. Returns (rank, number of ranks): (0, 1) with vLLM, which has its own processes."""
    if config.engine == "vllm":
        return 0, 1
    init_distributed(timeout_minutes=7 * 24 * 60)  # ranks with less work wait at the end
    seed_everything(config.train.seed, config.train.full_determinism_enable)
    dist.barrier()
    mesh = ProcessMesh.joined()
    return mesh.rank, mesh.size


def _sum_over_ranks(config: BatchInferenceConfig, number: int) -> int:
    if config.engine == "vllm":
        return number
    total = torch.tensor(number, device=current_device())
    dist.all_reduce(total)
    return int(total)
