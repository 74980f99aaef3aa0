"""Loads the models of training commands, with the precision and kernels of `ds.*`."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from openrlhf.models.configurations import apply_kwargs, check_class, load_config
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.scorer import ScoreModel, load_scorer


def load_language_model(config: Any, path: str, flag: str, *, in_4bit: bool = False) -> PreTrainedModel:
    return load_causal_lm(path, flag=flag, in_4bit=in_4bit, **loading_options(config, flag))


def load_reward_model(config: Any, path: str, flag: str, **options: Any) -> ScoreModel:
    """Loads a reward model, or a language model with a new head. `options`: further arguments of
    `load_scorer`."""
    head = config.ds.value_head_prefix
    return load_scorer(path, flag=flag, head_prefix=head, **loading_options(config, flag), **options)


def model_kwargs(config: Any, flag: str) -> Mapping[str, Any]:
    """Returns the options of transformers for the model that `flag` names. A reference has those of the model
    that learns."""
    first = next(iter(config.trained_models.values()))[0]
    sections = (getattr(config, f.removeprefix("--").partition(".")[0]) for f in (flag, first))
    return next(section.model_kwargs for section in sections if hasattr(section, "model_kwargs"))


def check_loadable(config: Any, path: str, flag: str) -> None:
    """Raises UsageError for a model that reads images in a run without them, and for options of transformers
    that the model at `path` does not have."""
    of_model = load_config(path, flag)
    if not config.reads_images:
        check_class(AutoModelForCausalLM, of_model, path, flag)
    apply_kwargs(of_model, model_kwargs(config, flag), path, flag)


def loading_options(config: Any, flag: str) -> dict[str, Any]:
    """Returns the arguments of all functions that load the model which `flag` names for training."""
    ds = config.ds
    return {
        "dtype": ds.param_dtype,
        "attention": ds.attention,
        "experts": ds.experts_implementation,
        "liger": ds.use_liger_kernel,
        "max_len": config.data.max_len,
        "images": config.data.reads_images,
        "model_kwargs": model_kwargs(config, flag),
    }
