"""Serves a reward model over HTTP: `openrlhf serve_rm`."""

from openrlhf.api import (
    ErrorCode,
    ServeRMConfig,
    UsageError,
    check_room,
    checking,
    end_token_id,
    freeze_heap,
    load_config,
    load_tokenizer,
    score_statistics,
    waiting,
)
from openrlhf.tools.serve.flags import SERVED_FLAG
from openrlhf.tools.serve.scoring import ScoreQueue, TextScorer, load_normalized
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
    normalize, experts = config.reward.normalize_enable, config.ds.experts_implementation
    model, mean, std = load_normalized(config, path, SERVED_FLAG, normalize=normalize, experts=experts)
    return TextScorer(
        model,
        tokenizer,
        max_len=config.data.max_len,
        max_tokens=config.max_tokens_per_gpu,
        batch_size=config.batch_size,
        mean=mean,
        std=std,
    )
