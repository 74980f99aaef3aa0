"""Damages copies of a run's checkpoints, and loads what a resume would choose of each copy into an engine."""

import random
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from damages import DAMAGES, damage

from openrlhf.backends.distributed import leave_distributed
from openrlhf.config.parse import parse
from openrlhf.loop.supervised.command import run
from openrlhf.loop.supervised.run import SupervisedRun
from openrlhf.loop.supervised.sft import SFTTask


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Returns everything that a load restores."""
    found: dict[str, torch.Tensor] = {}

    def flatten(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value.detach().clone()
        elif isinstance(value, dict):
            for key, item in value.items():
                flatten(f"{name}.{key}", item)
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                flatten(f"{name}.{i}", item)
        elif isinstance(value, np.ndarray):
            found[name] = torch.from_numpy(value.copy())
        elif isinstance(value, bool | int | float):
            found[name] = torch.tensor(float(value))

    flatten("weights", dict(engine.module.named_parameters()))
    flatten("steps", engine.steps)
    flatten("random", [random.getstate()[1], np.random.get_state(legacy=False), torch.get_rng_state()])
    if hasattr(engine, "engine"):
        flatten("optimizer", engine.engine.optimizer.state_dict())
        flatten("schedule", engine.engine.lr_scheduler.state_dict())
    else:
        flatten("optimizer", engine.optimizer.state_dict())
    return found


def main(spec: dict) -> dict:
    out, flags = Path(spec["out"]), spec["flags"].split()
    sound, copy = out / "sound", out / "copy"
    saving = ["--ckpt.output_dir", f"{out}/model", "--ckpt.path", str(sound), "--ckpt.save_steps", "2"]
    run(lambda: SFTTask, parse(SFTTask.command, [*flags, *saving, "--train.max_steps", "6"]).config)

    again = ["--ckpt.output_dir", f"{out}/again", "--ckpt.path", str(sound), "--ckpt.load_enable"]
    argv = [*flags, *again, "--train.max_steps", "100"]
    loaded = SupervisedRun(SFTTask(parse(SFTTask.command, argv).config), argv, ExitStack())
    checkpoints, engine = loaded.checkpoints, loaded.engine

    def load(folder: Path, tag: str) -> tuple[dict, dict[str, torch.Tensor]]:
        with torch.no_grad():
            for p in engine.module.parameters():
                if p.requires_grad:
                    p.add_(1.0)  # what is not loaded differs
        return engine.load_checkpoint(str(folder), tag), state_of(engine)

    truth = {tag: load(sound, tag) for tag in (f"global_step{step}" for step in (2, 4, 6))}
    same = lambda one, two: one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    report, rng = [], random.Random(spec["seed"])
    names = sorted(file.name for file in (sound / "global_step6").iterdir())
    for i in range(spec["count"]):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sound, copy)
        kind, name = DAMAGES[i % len(DAMAGES)], rng.choice(["latest", *names])
        file = copy / "latest" if name == "latest" else copy / "global_step6" / name
        changed = damage(kind, file, copy / "global_step2" / name, rng)
        checkpoints.path, checkpoints.folders = copy, (copy,)
        tag, reasons = checkpoints.find()
        state, restored = load(copy, tag) if tag else (None, {})
        is_right = tag is not None and state == truth[tag][0] and same(restored, truth[tag][1])
        entry = {"damage": f"{kind} {name}", "changed": changed, "tag": tag, "right": is_right}
        report.append({**entry, "reasons": reasons})
    only = [path for path in sorted(sound.glob("global_step*")) if path.name != "global_step6"]
    for path in only:
        shutil.rmtree(path)
    (sound / "global_step6" / names[-1]).write_bytes(b"")
    checkpoints.path, checkpoints.folders = sound, (sound,)
    refused = ""
    try:
        checkpoints.choose()
    except ValueError as error:
        refused = str(error)
    leave_distributed()
    return {"damages": report, "refused": refused, "names": names}
