"""Entry point `openrlhf`: reads the flags of the given command, and then imports the module that runs it."""

import difflib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from types import ModuleType

from openrlhf.errors import ErrorCode, UsageError, short_errors
from openrlhf.plugins import registered

OWN = {
    "sft": ("train_sft", "supervised fine-tuning"),
    "rm": ("train_rm", "train a reward model on pairs of answers"),
    "prm": ("train_prm", "train a process reward model on labelled steps"),
    "dpo": ("train_dpo", "preference optimization (DPO, IPO, cDPO) on pairs of answers"),
    "kto": ("train_kto", "KTO on single answers labelled good or bad"),
    "kd": ("train_kd", "knowledge distillation from a teacher model"),
    "ppo": ("train_ppo_ray", "reinforcement learning: PPO, GRPO, RLOO, ... with Ray and vLLM"),
    "completion": ("completion", "print a script that completes commands and flags in bash, zsh or fish"),
}
"""Command of this folder -> (its module, summary for `--help`)."""
TOOLS = ("demo", "fetch", "plan", "verify", "doctor", "view", "replay", "serve")
"""Folders of `openrlhf.tools` that have commands."""


FOLDERS = {"openrlhf.cli": OWN}
FOLDERS |= {f"openrlhf.tools.{tool}": import_module(f"openrlhf.tools.{tool}").COMMANDS for tool in TOOLS}
OURS = {
    name: (f"{folder}.{module}", summary)
    for folder, commands in FOLDERS.items()
    for name, (module, summary) in commands.items()
}
COMMANDS = OURS | {
    name: (point.module, f"of the package {point.dist.name if point.dist else point.module}")
    for name, point in registered("commands").items()
    if name not in OURS
}
"""Command -> (its module, summary for `--help`). Installed packages add those of the entry points
`openrlhf.commands`, and replace none."""


def reader_of(name: str) -> tuple[ModuleType, Callable[[Sequence[str]], None]]:
    """Returns the module that reads a command's flags, and the function that does and then runs the command:
    that of its name in the module `flags` of its folder, or else `main` of its own module."""
    place, _ = COMMANDS[name]
    folder, _, _ = place.rpartition(".")
    if name in OURS and name not in OWN:
        flags = import_module(f"{folder}.flags")
        if hasattr(flags, name):
            return flags, getattr(flags, name)
    module = import_module(place)
    return module, module.main


def main(argv: Sequence[str] | None = None) -> None:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        reader_of(name)[1](rest)
        return
    with short_errors():
        _tell(name)


def _tell(name: str) -> None:
    if name in ("--help", "-h", "help"):
        print(_usage())
    elif name == "--version":
        print(f"openrlhf {metadata.version('openrlhf')}")
    else:
        modules = {module.rpartition(".")[2]: command for command, (module, _) in COMMANDS.items()}
        alike = [command for command in COMMANDS if name in command or abs(len(command) - len(name)) < 2]
        near = difflib.get_close_matches(name, alike, n=1, cutoff=0.5)
        near = near or difflib.get_close_matches(name, modules, n=1, cutoff=0.8)
        remedy = f"did you mean `openrlhf {modules.get(near[0], near[0])}`?" if near else ""
        remedy = remedy or f"the commands are {', '.join(COMMANDS)}, see `openrlhf --help`"
        text = f"there is no such command; {remedy}"
        raise UsageError(ErrorCode.UNKNOWN_FLAG, text, flag="openrlhf", value=repr(name))


def _usage() -> str:
    lines = "\n".join(f"  openrlhf {name:<15} {summary}" for name, (_, summary) in COMMANDS.items())
    head = "usage: openrlhf COMMAND [--section.flag VALUE ...]"
    return f"{head}\n\n{lines}\n\nopenrlhf COMMAND --help lists its flags."


if __name__ == "__main__":
    main()
