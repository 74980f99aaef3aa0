"""Finds the command and the flags of a run that words describe: `RUN.yaml ...` or `COMMAND ...`."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from openrlhf.api import DPO, KD, KTO, PPO, PRM, RM, SFT, Command, ErrorCode, UsageError, list_flags
from openrlhf.api import OPTION_PREFIX as PREFIX
from openrlhf.api import flat_settings as flat

if TYPE_CHECKING:
    from openrlhf.api import SupervisedTask  # imports transformers

TRAINING: tuple[Command, ...] = (PPO, SFT, RM, PRM, DPO, KTO, KD)
"""Commands that train."""
ALONE: Mapping[str, Any] = {
    "ckpt.disable_ds": False,
    "ckpt.max_age_hours": None,
    "ckpt.push_to_hub": None,
    "logger.logging_steps": 1,
    "logger.tensorboard_dir": None,
    "logger.wandb.key": None,
    "logger.trackers": None,
    "logger.tracker_options": None,
    "train.hooks": None,
}
"""Values of flags with which a tool runs steps of a user's run: they are logged and saved in the tool's
folders, and nothing is sent elsewhere."""
SUPERVISED = tuple(command.name for command in TRAINING if command is not PPO)

MEASURED = ("timing/", "start/", "memory/", "throughput/", "health/")
"""Prefixes of metrics that depend on time or memory, and therefore differ between equal runs."""


def find_task_type(name: str) -> "type[SupervisedTask]":
    return import_module(f"openrlhf.cli.train_{name}").load_task()


def command_and_flags(words: Sequence[str], prog: str) -> tuple[Command, list[str]]:
    """Returns the command and its flags. A file after the command, or in its place, means `--config FILE`.
    Without a command, exactly one command must have all keys of the file. Raises UsageError if the command
    remains unknown."""
    names = {command.name: command for command in TRAINING}
    first, *rest = words[words[:1] == ["--config"] :] or [""]
    if first in names:
        files = [rest.pop(0)] if rest and _is_file(rest[0]) else []
        return names[first], [*(word for file in files for word in ("--config", file)), *rest]
    if _is_file(first):
        return _find_command(first, prog), ["--config", first, *rest]
    text = f"expects a YAML file of flags, or one of {', '.join(names)} with its flags"
    raise UsageError(ErrorCode.MISSING_FLAG, text, flag=prog, value=repr(first) if first else "")


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _find_command(file: str, prog: str) -> Command:
    try:
        tree = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(ErrorCode.NOT_FOUND, error.strerror or str(error), flag=prog, value=file) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = f"not YAML: {' '.join(str(error).split())[:200]}"
        raise UsageError(ErrorCode.UNREADABLE, text, flag=prog, value=file) from error
    keys = {key.replace("-", "_") for key in flat(tree)} if isinstance(tree, dict) else set()
    found = [command for command in TRAINING if all(_has(command, key) for key in keys)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(command.name for command in found or TRAINING)
    why = "its keys are flags of several commands" if found else "no single command has all of its keys"
    text = f"{why}; name the command ({names}): {prog} {(found or TRAINING)[0].name} {file}"
    raise UsageError(ErrorCode.MISSING_FLAG, text, flag=prog, value=file)


def _has(command: Command, key: str) -> bool:
    fields = list_flags(command.config_type)
    is_section = any(name.startswith(f"{key}.") for name in fields)
    is_option = command is PPO and key.startswith(PREFIX.rstrip("."))
    return not key or key in fields or key in command.old_flags or is_section or is_option
