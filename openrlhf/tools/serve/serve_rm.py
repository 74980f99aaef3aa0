"""Serves a reward model over HTTP: `openrlhf serve_rm`."""

from openrlhf.api import (
    DEVICE_TYPE,
    ErrorCode,
    ServeRMConfig,
    UsageError,
    check_room,
    checking,
    end_token_id,
    freeze_heap,
    load_config,
    load_scorer,
    load_tokenizer,
    resolve_row_layout,
    score_statistics,
    waiting,
)
from openrlhf.tools.serve.flags import SERVED_FLAG
from openrlhf.tools.serve.scoring import ScoreQueue, TextScorer
from openrlhf.tools.serve.server import bind, build_app, serve


def run(config: ServeRMConfig) -> None:
    with checking():
        check(config)
    freeze_heap()
    bound = bind(config.host, config.port)
    with waiting("loading the model", key=config.reward.model_name_or_path or ""):
        score = load(config)
    queue = ScoreQueue(score, max_waiting=config.max_queue)
    serve(build_app(queue, config), bound, config.drain_seconds)


def check(config: ServeRMConfig) -> None:
    path = config.reward.model_name_or_path or ""
    model_config = load_config(path, SERVED_FLAG)
    if config.reward.normalize_enable:
        score_statistics(model_config, path)
    check_room(model_config, config, "data.max_len", path=path)
    own = config.ds.param_dtype is None and str(model_config.dtype)
    if own == "torch.float32" and "flash_attention" in config.ds.attn_implementation:
        text = f"flash attention does not support the fp32 weights of {path}.\n"
        text += "Use auto, or --ds.param_dtype bf16."
        raise UsageError(
            ErrorCode.CONFLICT, text, flag="--ds.attn_implementation", value=config.ds.attn_implementation
        )


def load(config: ServeRMConfig) -> TextScorer:
    path = config.reward.model_name_or_path or ""
    tokenizer = load_tokenizer(path, flag=SERVED_FLAG, use_fast=not config.data.disable_fast_tokenizer)
    end_token_id(tokenizer)  # refuses a tokenizer without one
    model = load_scorer(
        path,
        flag=SERVED_FLAG,
        dtype=config.ds.param_dtype,
        attention=config.ds.attn_implementation,
        max_len=config.data.max_len,
        head_prefix=config.ds.value_head_prefix,
        experts=config.ds.experts_implementation,
        in_4bit=config.ds.load_in_4bit,
        trained=True,
    )
    model.to(DEVICE_TYPE).eval()
    resolve_row_layout(model, model)
    normalized = config.reward.normalize_enable
    mean, std = score_statistics(model.model.config, path) if normalized else (0.0, 1.0)
    return TextScorer(
        model,
        tokenizer,
        max_len=config.data.max_len,
        max_tokens=config.max_tokens_per_gpu,
        batch_size=config.batch_size,
        mean=mean,
        std=std,
    )
