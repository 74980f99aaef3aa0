"""Forks a run: copies a checkpoint of another run into the folder of this one, which loads it with its own
settings."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from openrlhf.config.ppo import PPOConfig
from openrlhf.config.resume import SHAPES, reorders
from openrlhf.errors import ErrorCode, UsageError, notify
from openrlhf.files import check_owner
from openrlhf.training.checkpoints import NAMED, CheckpointFolder, step_of
from openrlhf.training.origin import Origin, changes, is_of_generation
from openrlhf.training.start import Config, check_output, main_folder


class Source(NamedTuple):
    """The checkpoint to fork."""

    checkpoints: CheckpointFolder
    tag: str
    origin: Origin


def check_fork(config: Config) -> bool:
    """Returns whether this start forks a run. One that resumes from a checkpoint of its own does not. Raises
    UsageError if there is nothing to fork, or if a flag that shapes its tensors differs."""
    ckpt = config.ckpt
    if ckpt.fork_from is None or (ckpt.load_enable and CheckpointFolder(main_folder(config), ckpt).newest()):
        return False
    source_of(config, verify="structure")
    return True


def fork(config: Config, own: CheckpointFolder, total_steps: int) -> None:
    """Forks the run that `ckpt.fork_from` names, if this start does: afterwards the newest checkpoint of
    `own` is a copy of its checkpoint. Prints the settings that differ. Call it on rank 0, which has locked
    the folders."""
    if not check_fork(config):
        return
    check_output(config, resumes=False)
    source, now = source_of(config), own.origin
    before = source.origin
    assert now is not None  # set in every run that loads a checkpoint
    if before.command != now.command:
        text = f"`openrlhf {before.command}` wrote it, and this is `openrlhf {now.command}`"
        raise refused(config, ErrorCode.OTHER_RUN, f"{text}.\nName a checkpoint of the same command.")
    changed = [change for change in changes(before, now) if not is_of_generation(change, before, now)]
    keys = [change.flag.removeprefix("--") for change in changed]
    _check_shapes(config, [str(change) for change, key in zip(changed, keys, strict=True) if key in SHAPES])
    if (step := step_of(source.tag)) >= total_steps:
        text = f"it is of step {step}, and this run ends after step {total_steps}.\nRaise its length"
        raise refused(config, ErrorCode.INVALID_VALUE, f"{text} (--train.*, or more data).")
    earlier = source.checkpoints.saved(source.tag).get("fork") or {"data_from": 0}
    restarts = any(reorders(now.command, key) for key in keys)
    for line in own.set_aside():
        print(line, flush=True)
    own.fork = {
        "folder": str(source.checkpoints.path),
        "tag": source.tag,
        "step": step,
        "data_from": step if restarts else earlier["data_from"],
        "changed": [change._asdict() for change in changed],
    }
    own.take_over(source.checkpoints, source.tag)
    own.has_forked = True
    lines = [*map(str, changed), *(["the data begins at its first row"] if restarts else [])]
    text = "\n".join(f"  {line}" for line in lines) or "  no setting differs"
    print(f"note: a fork of {source.checkpoints.path / source.tag}, step {step}:\n{text}", flush=True)


def source_of(config: Config, verify: Literal["structure"] | None = None) -> Source:
    """Finds the checkpoint to fork; `verify` replaces `ckpt.verify`. Raises UsageError without one, or if a
    flag that shapes its tensors differs."""
    place, is_rl = Path(os.path.abspath(str(config.ckpt.fork_from))), isinstance(config, PPOConfig)
    root, tag = (place.parent, place.name) if NAMED.fullmatch(place.name) else (place, None)
    root = root.parent if is_rl and root.name == "_actor" else root
    if os.path.realpath(root) == os.path.realpath(config.ckpt.folder):
        text = "this is the run's own checkpoint folder.\nName another --ckpt.output_dir or --ckpt.path, or "
        raise refused(config, ErrorCode.CONFLICT, f"{text}resume with --ckpt.load_enable.")
    others = [f"{root}/_critic"] if isinstance(config, PPOConfig) and config.uses_critic else []
    if is_rl and (root / "_actor").is_dir() and (root / "_critic").is_dir() != bool(others):
        its, needs = ("no critic", "one") if others else ("a critic", "none")
        text = f"it has {its}, and this run has {needs}.\nChoose another --algo.advantage.estimator."
        raise refused(config, ErrorCode.OTHER_RUN, text)
    ckpt = replace(config.ckpt, verify=verify or config.ckpt.verify)
    folder = CheckpointFolder(str(root / "_actor" if is_rl else root), ckpt, others)
    tag, skipped = folder.find(tag)
    reasons = "\n".join(f"  {reason}" for reason in skipped)
    if tag is None and skipped:
        raise refused(config, ErrorCode.DAMAGED_CHECKPOINT, f"no checkpoint can be read:\n{reasons}")
    if tag is None:
        text = (
            "it has no checkpoint of this command.\nName another run's --ckpt.path, which is by default the "
        )
        raise refused(config, ErrorCode.NOT_FOUND, f"{text}folder `checkpoints` in its --ckpt.output_dir.")
    if skipped and verify is None:
        notify(f"--ckpt.fork_from: in {folder.path}:\n{reasons}")
    for part in folder.folders:  # the copy is this user's
        check_owner(part / tag, "--ckpt.fork_from")
    if (origin := folder.saved(tag).get("origin")) is None:
        text = "an older release wrote it: it records no settings.\nResume it, and fork its next checkpoint."
        raise refused(config, ErrorCode.OTHER_RUN, text)
    flags = changes(origin, Origin.of(origin.command, config, {}))
    shapes = {f"--{key}" for key in SHAPES if not key.endswith("model_name_or_path")}  # told by its files
    _check_shapes(config, [str(change) for change in flags if change.flag in shapes])
    return Source(folder, tag, origin)


def _check_shapes(config: Config, differences: list[str]) -> None:
    if differences:
        lines = "\n".join(f"  {difference}" for difference in differences)
        text = f"these shape the checkpoint's tensors, so a fork must keep them:\n{lines}"
        raise refused(config, ErrorCode.OTHER_RUN, text)


def refused(config: Config, code: ErrorCode, text: str) -> UsageError:
    return UsageError(code, text, flag="--ckpt.fork_from", value=config.ckpt.fork_from)
