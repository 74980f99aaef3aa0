"""Loads an exported model with transformers, as a user would."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoTokenizer

from openrlhf.api import CLASSIFIER_HEAD
from openrlhf.tools.plan.rehearsal.shrinking import find_class


def reloaded(folder: Path, base: Path, *, head: str = CLASSIFIER_HEAD) -> str:
    """Loads a model that a run exported (an adapter with PEFT, on the model `base`), computes its outputs and
    returns a description. Raises ValueError if a weight is missing or the outputs are not finite. `head`:
    name of the scalar head in the files of a reward model."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if (folder / "adapter_config.json").exists():
        model, missing = PeftModel.from_pretrained(_load(base)[0], str(folder)), []
    else:
        model, missing = _load(folder)
    if head != CLASSIFIER_HEAD:  # the file's head has another name than that of transformers' classifier
        missing = [name for name in missing if not name.startswith(f"{CLASSIFIER_HEAD}.")]
    if missing:
        raise ValueError(f"the exported model lacks weights: {', '.join(missing[:5])}")
    ids = torch.arange(min(16, len(tokenizer)))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    if not logits.isfinite().all():
        raise ValueError("the outputs of the exported model are not finite")
    kind = type(model).__name__
    return f"{kind} and its tokenizer of {len(tokenizer):,} tokens load, and the outputs are finite"


def _load(folder: Path) -> tuple[Any, list[str]]:
    """Returns the model and the names of weights that its files lack."""
    model_class = find_class(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model, info = model_class.from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
    return model.eval(), sorted(info["missing_keys"])
