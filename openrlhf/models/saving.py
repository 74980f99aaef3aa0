"""Saves models, and finds out before a run whether what it trains could be saved."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from openrlhf.errors import ErrorCode, UsageError, first_line
from openrlhf.models.loading import GENERATION, load_config


def save_model(model: PreTrainedModel, folder: str | Path, state: Mapping[str, Tensor]) -> None:
    """Writes a model with the weights `state` in Hugging Face format. config.json gets their dtype, and
    generation_config.json the content with which the model was loaded: transformers would refuse to write
    many files that it reads."""
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    own: Any = model.generation_config if model.can_generate() else None
    try:
        if own is not None:
            model.generation_config = GenerationConfig()
        model.save_pretrained(folder, state_dict=dict(state))
    finally:
        model.generation_config = own
    if own is not None:
        own.to_json_file(Path(folder, GENERATION), use_diff=True, keys_to_pop=["compile_config"])
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.save_pretrained(folder)


def check_saving(path: str, flag: str, reader: Any) -> None:
    """Raises UsageError if a model could be trained, and not be saved. Tries it in a temporary folder.
    `reader`: the tokenizer or processor that is saved with the model."""
    with TemporaryDirectory(prefix="openrlhf-export-") as folder:
        for name, part in (("config.json", load_config(path, flag)), ("tokenizer or processor", reader)):
            try:
                part.save_pretrained(folder)
            except OSError:
                raise  # of the disk
            except Exception as error:  # of any class of transformers
                text = (
                    f"its {name} can be read and not be written, so no trained model could be saved: "
                    f"{first_line(error)}\nCorrect the file in the model's folder."
                )
                raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path) from error
