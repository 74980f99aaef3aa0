"""Runs commands of this project on CPU cores in child processes, and compares their results."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from openrlhf.api import CLASSIFIER_HEAD, Metrics, RunIndex
from openrlhf.tools.command_line.jobs import logged_job
from openrlhf.tools.command_line.run_files import MEASURED
from openrlhf.tools.plan.rehearsal.shrinking import find_class

ON_CORES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "RAY_ADDRESS": "local",
    "OMP_NUM_THREADS": "1",
    "WANDB_MODE": "disabled",
}
"""Environment variables of a rehearsed run."""


class RunFailedError(RuntimeError):
    """Raised if a rehearsed run fails. The text has the end of its log."""


@dataclass(frozen=True, slots=True)
class Result:
    """A rehearsed run that succeeded."""

    folder: Path

    @property
    def metrics(self) -> dict[int, Metrics]:
        return RunIndex(self.folder / "run").metrics()

    @property
    def model(self) -> Path:
        return self.folder / "model"


def run_command(
    command: str, flags: Path, folder: Path, *, ranks: int, tick: Callable[[float], None] = lambda s: None
) -> Result:
    """Runs `openrlhf COMMAND --config FLAGS` without GPUs, the user's Ray cluster and the user's cache.
    `tick`: as in `run_job`. Raises RunFailedError."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["openrlhf.cli.main", command, "--config", str(flags)]
    environment = os.environ | ON_CORES | {"OPENRLHF_CACHE": str(folder.parent / "cache")}
    if problem := logged_job(words, folder / "log.txt", ranks=ranks, environment=environment, tick=tick):
        raise RunFailedError(problem)
    return Result(folder)


# ---- comparisons

NOT_COMPARED = (*MEASURED, "eval/", "mismatch/")
"""Prefixes of metrics that differ between equal runs, or that not every run has."""
COUNTED = ("clip_fraction", "clip_low_fraction", "clip_high_fraction", "masked_fraction")
"""Ends of the names of fractions of actions beyond a limit."""
MOST = 8
"""Maximum number of metrics that a message lists."""


def check_equal(
    one: Metrics, other: Metrics, between: str, *, relative: float, absolute: float, at_limits: float = 0.0
) -> None:
    """Raises RunFailedError with both values of the common metrics that differ by more than `absolute` +
    `relative` times the larger value. `at_limits`: fraction of the actions that may be so close to a limit
    that rounding decides on which side they are."""
    found = []
    for name in sorted(one.keys() & other.keys()):
        a, b = one[name], other[name]
        allowed = absolute + relative * max(abs(a), abs(b)) + at_limits * name.endswith(COUNTED)
        if not (name.startswith(NOT_COMPARED) or abs(a - b) <= allowed or (a != a and b != b)):
            found.append(f"{name}: {a:.6g} and {b:.6g}")
    if found:
        raise RunFailedError("\n".join([f"{between} differ:", *found[:MOST]]))


def weight_difference(one: Path, other: Path) -> float:
    """Returns the largest difference of two exported models' weights. Raises ValueError for other shapes."""
    a, b = _weights(one), _weights(other)
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        raise ValueError(f"the weights in {one} and {other} have different names or shapes")
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def _weights(folder: Path) -> dict:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


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
    model_class = find_class(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model, info = model_class.from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
    return model.eval(), sorted(info["missing_keys"])
