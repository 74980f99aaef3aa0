"""Starts a training command, between loading its data and its model: checks and locks its folders, and
selects the checkpoint to resume from."""

import os
import re
from contextlib import ExitStack, suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from openrlhf.config.fields import flag_values, with_values
from openrlhf.config.parse import Invocation
from openrlhf.config.sections import TrainingConfig
from openrlhf.errors import ErrorCode, UsageError, notify
from openrlhf.faults import VARIABLE, faults
from openrlhf.files import holds_model, read_object, unwritable
from openrlhf.observability.lock import locked
from openrlhf.text import Calendar

if TYPE_CHECKING:
    from openrlhf.checkpoint.folder import CheckpointFolder, Found

Config = Any
"""A `TrainingConfig` with the sections `data`, `train` and `ds` of its command."""
ConfigT = TypeVar("ConfigT", bound=TrainingConfig)

DAY = "the date that chat templates write"
"""Key in `RunFingerprint.contents`."""
TAG = re.compile(r"global_step(\d+)(_universal)?")
"""Names of checkpoints. Copies of users may have others, such as `global_step20_good`."""


def _recorded(config: Config, section: str, key: str) -> str | None:
    """Returns a text in the fingerprint of the newest checkpoint that a run begins with and that has it."""
    places = Path(config.checkpoints[0]).glob("global_step*/origin.json") if config.ckpt.load_enable else ()
    found = {int(tag[1]): file for file in places if (tag := TAG.fullmatch(file.parent.name))}
    if not found and config.ckpt.fork_from and section == "contents":
        found = {0: Path(config.ckpt.fork_from, "origin.json")}
    for _, file in sorted(found.items(), reverse=True):
        with suppress(ValueError, LookupError, TypeError):  # damage is told when one is chosen
            return str(read_object(file)["origin"][section][key])
    return None


def find_start_day(config: Config) -> date:
    """Returns the date that chat templates write: the day on which the run started, which its checkpoints
    record, or today."""
    with suppress(ValueError):
        return date.fromisoformat(_recorded(config, "contents", DAY) or "")
    return Calendar.today


def continuing(invocation: Invocation[ConfigT]) -> ConfigT:
    """Returns the configuration of a command, with the name of the run that it resumes unless a flag gives
    another one: the run folder of that name then goes on."""
    config, flag = invocation.config, "logger.wandb.run_name"
    name = None if flag in invocation.explicit else _recorded(config, "flags", flag)
    return with_values(config, {flag: name}) if name else config


def check_places(config: Config) -> None:
    """Raises UsageError if the run cannot write to one of its folders. Creates nothing."""
    if armed := faults(os.environ.get(VARIABLE, "")):
        notify(f"{VARIABLE} is set: {len(armed)} faults are injected into this run")
    ckpt = config.ckpt
    is_there = os.path.lexists(ckpt.folder) or os.path.exists(f"{ckpt.fork_from}/origin.json")
    if ckpt.fork_from and not (is_there and re.search(r"/(best_)?global_step\d+/*$", f"/{ckpt.fork_from}")):
        text = "it is no checkpoint.\nName a folder `global_step{N}` in another run's --ckpt.path."
        raise UsageError(ErrorCode.NOT_FOUND, text, flag="--ckpt.fork_from", value=ckpt.fork_from)
    for flag, folder in config.folders.items():
        if reason := unwritable(folder):
            text = (
                f"cannot be written to: {reason}.\nFree space, change its permissions, or name another "
                "folder."
            )
            raise UsageError(ErrorCode.NOT_WRITABLE, text, flag=flag, value=folder)


def check_output(config: Config, *, resumes: bool) -> None:
    """Raises UsageError if the run would overwrite a finished model, unless it resumes the run that wrote it,
    or a model that it reads: an adapter, for example, would replace its base model."""
    remedy = "Name another --ckpt.output_dir, resume the run that wrote the model (--ckpt.load_enable), or "
    remedy += "overwrite the model (--ckpt.overwrite)."
    for flag, folder in config.exports.items():
        check_export(config, folder, flag, resumes=resumes, remedy=remedy)


def check_export(config: Config, folder: str, flag: str, *, resumes: bool, remedy: str) -> None:
    """Raises UsageError, like `check_output`, if a model may not be written to the folder of `flag`."""
    for key, path in _models(config):
        if os.path.exists(path) and os.path.exists(folder) and os.path.samefile(path, folder):
            text = f"this run reads the model in this folder (--{key}).\nName another one."
            raise UsageError(ErrorCode.CONFLICT, text, flag=flag, value=folder)
    if not (resumes or config.ckpt.overwrite) and holds_model(folder):
        text = f"this folder holds a model, which this run would overwrite.\n{remedy}"
        raise UsageError(ErrorCode.NOT_WRITABLE, text, flag=flag, value=folder)


def _models(config: Config) -> list[tuple[str, str]]:
    """Returns (flag, name or path) of each model that a flag names."""
    flags = {key: value for key, value in flag_values(config).items() if key.endswith("model_name_or_path")}
    return [(key, path) for key, value in flags.items() if value for path in value.split(",")]


def lock_folders(checkpoints: "CheckpointFolder", run_dir: str, held: ExitStack) -> None:
    """Locks the run's folders until `held` is closed, and removes unfinished checkpoints of a killed run.
    Call it on rank 0 only. Raises UsageError if a living run holds a folder."""
    if checkpoints.ckpt.is_used:
        held.enter_context(locked(checkpoints.ckpt.folder, flag="--ckpt.path"))
        for line in checkpoints.remove_unfinished():
            notify(line)
    held.enter_context(locked(run_dir, flag="--logger.run_dir"))


def choose_checkpoint(config: Config, checkpoints: "CheckpointFolder", found: "Found | None") -> str | None:
    """Returns the tag of the checkpoint to resume from (None: start from the beginning), and prints lines
    about it. Call it on rank 0 only. `found`: the result of `find_or_fork`. Raises UsageError if all
    checkpoints are damaged, or if the checkpoint belongs to another run."""
    tag, lines = checkpoints.choose(found)
    check_output(config, resumes=tag is not None)
    for reason in found.skipped if found else ():
        notify(f"--ckpt.load_enable: in {checkpoints.path}: {reason}")
    for line in lines:
        print(line, flush=True)
    return tag


def move_old_checkpoints(checkpoints: "CheckpointFolder", tag: str | None) -> None:
    """Moves checkpoints of an earlier run to a subfolder, if this run starts from the beginning and will save
    its own."""
    if tag is None and checkpoints.ckpt.save_steps > 0:
        for line in checkpoints.set_aside():
            print(line, flush=True)


class Loop(Protocol):
    """The loop of a run."""

    step: int
    checkpoints: "CheckpointFolder"

    @property
    def total_steps(self) -> int: ...


def position(trainer: Loop, is_at_boundary: bool) -> str:
    """Returns a text with the step at which a run ends and how to resume it. `is_at_boundary`: True between
    two steps."""
    step, total = trainer.step, trainer.total_steps
    where = f"in step {step + 1} of {total}" if step < total else f"after step {step}, the last one"
    if is_at_boundary and step < total:
        where = f"after step {step} of {total}"
    return f"{where}; {trainer.checkpoints.resume_hint()}"


def find_grace(config: Config) -> float:
    """Returns the seconds that a run has after a signal to reach a step boundary; 0 if it saves no checkpoint
    there."""
    return config.train.grace_seconds if config.ckpt.saves_state else 0.0
