"""Configuration of `lora_combiner`, and the checks of its flags."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from openrlhf.config.checks import first_of_each, folder_problem, local_models, required
from openrlhf.config.choices import ParamDtype
from openrlhf.config.command import Explicit, Problem
from openrlhf.errors import ErrorCode


@dataclass(frozen=True, kw_only=True)
class MergeDeepSpeedConfig:
    """Precision."""

    param_dtype: ParamDtype | None = None
    """Data type of the merged weights. None: that of the base model."""


@dataclass(frozen=True, kw_only=True)
class LoraCombinerConfig:
    """Merge a LoRA adapter into its base model."""

    model_path: str = ""
    """Base model on which the adapter was trained: a Hugging Face name or a folder. Required."""
    lora_path: str = ""
    """Adapter: a folder or a Hugging Face name. Required."""
    output_path: str = ""
    """Folder for the merged model and its tokenizer. Required."""
    overwrite: bool = False
    """Overwrite the model that is in output_path."""
    is_rm: bool = False
    """The adapter belongs to a reward model."""
    ds: MergeDeepSpeedConfig = MergeDeepSpeedConfig()


def _output(config: LoraCombinerConfig) -> Iterator[Problem]:
    key, folder = "output_path", config.output_path
    if problem := folder_problem(folder):
        yield Problem(key, problem, ErrorCode.NOT_WRITABLE)
    if os.path.isdir(folder) and os.listdir(folder) and not config.overwrite:
        text = "is not empty, and its model would be overwritten; name a new folder, or use --overwrite"
        yield Problem(key, text, ErrorCode.NOT_WRITABLE)


def lora_combiner_problems(config: LoraCombinerConfig, explicit: Explicit) -> list[Problem]:
    return first_of_each(
        [
            *required(config, "model_path", "lora_path", "output_path"),
            *local_models(config, "model_path", "lora_path"),
            *_output(config),
        ]
    )
