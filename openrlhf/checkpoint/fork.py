"""Forks a run: copies a checkpoint of another run into the folder of this one, which resumes from the copy
with its own settings."""

import os
from pathlib import Path

from openrlhf.checkpoint.folder import CheckpointFolder, Found
from openrlhf.checkpoint.run_fingerprint import changes, unknown
from openrlhf.checkpoint.saved import parse_step
from openrlhf.checkpoint.start import Config, check_output
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.files import check_owner

SHAPES = {
    *(f"{model}model_name_or_path" for model in ("model.", "actor.", "critic.")),
    *(f"{model}freeze_visual_encoder" for model in ("model.", "actor.")),
    *(f"{model}freeze_moe_router" for model in ("model.", "actor.", "critic.")),
    *("optim", "actor.optim", "critic.optim", "train.backend", "train.enable_ema"),
    *("ds.param_dtype", "ds.grad_accum_dtype", "ds.tensor_parallel_size", "ds.load_in_4bit"),
    *("ds.lora.rank", "ds.lora.target_modules", "ds.value_head_prefix"),
}
"""Flags that shape the tensors of a checkpoint: a fork cannot change them."""
ORDER = {
    *("data.dataset", "data.prompt_dataset", "train.seed", "algo.dynamic_filtering_enable"),
    *("rollout.batch_size", "data.curriculum", "tasks"),
}
"""Flags that decide which rows a step reads: a fork that changes one begins the data at the first row.
`train.batch_size` is one in supervised commands."""


def find_or_fork(config: Config, own: CheckpointFolder, total_steps: int) -> Found | None:
    """Finds the checkpoint to resume from; returns None without ckpt.load_enable. If there is none, it is a
    copy of the one that `ckpt.fork_from` names. Call it on rank 0, which has locked the folders. Raises
    UsageError if that one cannot be forked."""
    if not config.ckpt.load_enable:
        return None
    found = own.find()
    if config.ckpt.fork_from and not (found.tag or found.skipped):
        check_output(config, resumes=False)
        place = Path(os.path.abspath(config.ckpt.fork_from))
        others = [str(place.parent.with_name(folder.name)) for folder in own.folders[1:]]
        _fork(own, CheckpointFolder(str(place.parent), config.ckpt, others), place.name, total_steps)
        found = own.find()
    return found


def _fork(own: CheckpointFolder, source: CheckpointFolder, tag: str, total_steps: int) -> None:
    """Copies the checkpoint, with a record of the fork, and prints the settings that differ."""
    _check_damage(source, tag)
    record, place, now, step = source.at(tag).record(), source.path / tag, own.fingerprint, parse_step(tag)
    assert record is not None and now is not None  # set in every run that resumes
    before, data_from = record.fingerprint, record.fork.get("data_from", 0)
    found = [("the command", before.command, now.command), *changes(before, now)]
    changed = {name: {"was": was, "now": is_} for name, was, is_ in found if was != is_}
    lines = {n.removeprefix("--"): f"  {n} was {c['was']}, is {c['now']}" for n, c in changed.items()}
    if kept := [lines[key] for key in lines if key in {"the command", *SHAPES}]:
        text = "\n".join(["a fork must keep what shapes the checkpoint's tensors:", *kept])
        raise UsageError(ErrorCode.OTHER_RUN, text, flag="--ckpt.fork_from", value=place)
    if step >= total_steps:
        text = f"this run ends after step {total_steps}.\nRaise its length (--train.*, or more data)."
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag="--ckpt.fork_from", value=place)
    order = ORDER | {key for key in lines if key.startswith("tasks.") and key.endswith(".quota")}
    if lines.keys() & (order if now.command == "ppo" else {*order, "train.batch_size"}):
        data_from, lines["data"] = step, "  the data begins at its first row"
    own.fork = {"from": str(place), "step": step, "data_from": data_from, "changed": changed}
    own.take_over(source, tag)
    told = "\n".join([*lines.values(), *(f"  {text}" for text in unknown(before, now))])
    print(f"note: a fork of {place}, step {step}:\n{told or '  no setting differs'}", flush=True)


def _check_damage(source: CheckpointFolder, tag: str) -> None:
    """Raises UsageError if the checkpoint is damaged, old or another user's, or lacks a model."""
    place, old = source.path / tag, "an older release wrote it, which did not record its settings"
    found = source.at(tag)
    if reason := found.damage(hashes=source.ckpt.verify == "full") or (not found.record() and old):
        critic = " that has a critic" * (len(source.folders) - 1)
        text = f"it cannot be forked: {reason}.\nName another one{critic}."
        raise UsageError(ErrorCode.DAMAGED_CHECKPOINT, text, flag="--ckpt.fork_from", value=place)
    for folder in source.folders:  # the copy is this user's
        check_owner(folder / tag, "--ckpt.fork_from")
