"""Loads the models of training commands, with the precision and kernels of `ds.*`."""

from typing import Any

from transformers import PreTrainedModel

from openrlhf.models import loading, scorer


def load_language_model(config: Any, path: str, flag: str, *, in_4bit: bool = False) -> PreTrainedModel:
    return loading.load_causal_lm(path, flag=flag, in_4bit=in_4bit, **_options(config))


def load_reward_model(config: Any, path: str, flag: str, **options: Any) -> scorer.ScoreModel:
    """Loads a reward model, or a language model with a new head. `options`: further arguments of
    `load_scorer`."""
    head = config.ds.value_head_prefix
    return scorer.load_scorer(path, flag=flag, head_prefix=head, **_options(config), **options)


def _options(config: Any) -> dict[str, Any]:
    ds = config.ds
    return {
        "dtype": ds.param_dtype,
        "attention": ds.attention,
        "experts": ds.experts_implementation,
        "liger": ds.use_liger_kernel,
        "max_len": config.data.max_len,
        "images": config.data.reads_images,
    }
