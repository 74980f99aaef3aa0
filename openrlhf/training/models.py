"""Loads the language models of training commands, with the precision and kernels of `ds.*`; tokenizers."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.config.supervised import MODEL_FLAG
from openrlhf.models.loading import load_causal_lm, load_tokenizer


def load_language_model(config: Any, path: str, flag: str, *, in_4bit: bool = False) -> PreTrainedModel:
    return load_causal_lm(path, flag=flag, in_4bit=in_4bit, **loading_options(config))


def loading_options(config: Any) -> dict[str, Any]:
    """Returns the arguments of all functions that load a model for training."""
    ds = config.ds
    return {
        "dtype": ds.param_dtype,
        "attention": ds.attention,
        "experts": ds.experts_implementation,
        "liger": ds.use_liger_kernel,
        "max_len": config.data.max_len,
        "images": config.data.reads_images,
    }


def load_run_tokenizer(config: Any) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of `config.model`, the model to train or to query, as `config.data` says."""
    return load_tokenizer(
        config.model.model_name_or_path,
        flag=MODEL_FLAG,
        use_fast=not config.data.disable_fast_tokenizer,
        chat_template=getattr(config.data, "tokenizer_chat_template", None),
    )
