"""Code that runs inside of a stage's process: imports, work, and the file with its result."""

import importlib
import json
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpukit.report import write_whole
from gpukit.stage import Setting, Stage

ROOT = Path(__file__).resolve().parents[2]


def perform(stage: Stage, setting: Setting, result: Path) -> None:
    """Runs a stage and writes its outcome, figures and reason. Later output of the process changes none of
    them."""
    write_whole(result, json.dumps(_outcome(stage, setting)))


def _outcome(stage: Stage, setting: Setting) -> dict[str, Any]:
    if setting.rehearsal and not stage.rehearsed:
        return {"outcome": "skip", "reason": "cannot be rehearsed on a CPU"}
    try:
        if reason := _missing(stage, setting):
            return {"outcome": "skip", "reason": reason}
        module, _, function = stage.work.partition(":")
        work = getattr(importlib.import_module(module), function)
        return {"outcome": "pass", "figures": work(setting, **stage.options)}
    except Exception as error:  # every exception is a finding of the stage
        traceback.print_exc()
        first_line = (str(error).strip().splitlines() or [""])[0][:300]
        return {"outcome": "fail", "reason": f"{type(error).__name__}: {first_line}".rstrip(": ")}


def _missing(stage: Stage, setting: Setting) -> str:
    """Returns why the stage cannot run, or "". Packages are imported, so one that is there and broken is an
    error."""
    with suppress(ModuleNotFoundError):
        importlib.import_module("openrlhf")  # first: it repairs imports of CUDA builds beside a CPU build
    for name in (*(["torch"] if stage.gpus else []), *stage.packages):
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None:
                raise
            own = error.name == name
            return f"{name} is not installed" if own else f"{name} needs {error.name}, which is not installed"
        # a folder of that name, such as that of the one file of vLLM that is carried along
        if found.__file__ is None:
            return f"{name} is not installed"
    if stage.model and not (ROOT / stage.model).is_dir():
        name = Path(stage.model).name
        return f"{stage.model} is not there; write it by `openrlhf fetch {name} --output {stage.model}`"
    if setting.rehearsal or not stage.gpus:
        return ""
    import torch

    found = torch.cuda.device_count()
    return f"needs {stage.gpus} GPUs, {found} there" if found < stage.gpus else ""
