"""Saves models, and finds out before a run whether what it trains could be saved."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import cached_file

from openrlhf.errors import ErrorCode, UsageError, first_line
from openrlhf.files import read_object, write_atomically
from openrlhf.hub import model_folder
from openrlhf.models.configurations import load_config
from openrlhf.models.ends import GENERATION


def save_model(model: PreTrainedModel, folder: str | Path, state: Mapping[str, Tensor]) -> None:
    """Writes a model with the weights `state` in Hugging Face format. config.json gets their dtype.
    generation_config.json stays as it was read: transformers would refuse to write many of them."""
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    own: Any = model.generation_config if model.can_generate() else None
    model.generation_config = own and GenerationConfig()
    model.save_pretrained(folder, state_dict=dict(state))
    model.generation_config = own
    if own is not None:
        own.to_json_file(Path(folder, GENERATION), use_diff=True, keys_to_pop=["compile_config"])
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.save_pretrained(folder)


def save_ends(folder: str | Path, base: str, ids: Iterable[int]) -> None:
    """Adds end tokens to the generation_config.json of an exported model: `generate` of transformers ends an
    answer at those alone. An adapter gets a copy of that of its `base`, for the model that it is merged into.
    Reward models and critics have none."""
    own, adapter = Path(folder, GENERATION), Path(folder, "adapter_config.json")
    if adapter.exists() and read_object(adapter).get("task_type") == "CAUSAL_LM":
        values = _generation_values(base)
    elif own.exists():
        values = read_object(own)
    else:
        return
    known = values.get("eos_token_id")
    listed = [known] if isinstance(known, int) else known or []
    if added := [number for number in ids if number not in listed]:
        ends = [*listed, *added]
        values["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        write_atomically(own, [json.dumps(values, indent=2) + "\n"], shared=True)


def _generation_values(base: str) -> dict[str, Any]:
    """Returns the generation_config.json of a folder or a name on the hub; without one, what transformers
    makes of its config.json."""
    path = model_folder(base)
    if file := cached_file(path, GENERATION, _raise_exceptions_for_missing_entries=False):
        return read_object(Path(file))
    return GenerationConfig.from_model_config(load_config(base, "")).to_diff_dict()


def check_saving(path: str, flag: str, reader: Any) -> None:
    """Raises UsageError if a trained model could not be saved. `reader`: its tokenizer or processor."""
    own = Path(path, GENERATION)
    with TemporaryDirectory(prefix="openrlhf-export-") as folder:
        parts = {
            "config.json": lambda: load_config(path, flag).save_pretrained(folder),
            "tokenizer or processor": lambda: reader.save_pretrained(folder),
            GENERATION: lambda: own.exists() and GenerationConfig.from_dict(json.loads(own.read_bytes())),
        }
        for name, write in parts.items():
            try:
                write()
            except Exception as error:  # of any class of transformers
                text = (
                    f"its {name} cannot be read and written again, so no trained model could be saved: "
                    f"{first_line(error)}\nCorrect the file in the model's folder."
                )
                raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path) from error
