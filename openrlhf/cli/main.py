"""Entry point `openrlhf`: reads the flags of the given command, and then imports the module that runs it."""

import difflib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from types import ModuleType

from openrlhf import tools
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
MODULES = {module: name for name, (module, _) in OWN.items()} | {"interactive_chat": "chat"}
"""Module of this folder with another name than its command -> the command."""
OURS = {name: (f"openrlhf.cli.{module}", summary) for name, (module, summary) in OWN.items()}
OURS |= {
    name: (module, summary)
    for module, commands in tools.COMMANDS.items()
    for name, summary in commands.items()
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
    `main`, or that of the command's name in a module of several commands."""
    module = import_module(COMMANDS[name][0])
    return module, getattr(module, "main", None) or getattr(module, name)


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
        alike = [command for command in COMMANDS if name in command or abs(len(command) - len(name)) < 2]
        near = difflib.get_close_matches(name, alike, n=1, cutoff=0.5)
        near = near or difflib.get_close_matches(name, MODULES, n=1, cutoff=0.8)
        remedy = f"did you mean `openrlhf {MODULES.get(near[0], near[0])}`?" if near else ""
        remedy = remedy or f"the commands are {', '.join(COMMANDS)}, see `openrlhf --help`"
        text = f"there is no such command; {remedy}"
        raise UsageError(ErrorCode.UNKNOWN_FLAG, text, flag="openrlhf", value=repr(name))


def _usage() -> str:
    lines = "\n".join(f"  openrlhf {name:<15} {summary}" for name, (_, summary) in COMMANDS.items())
    head = "usage: openrlhf COMMAND [--section.flag VALUE ...]"
    return f"{head}\n\n{lines}\n\nopenrlhf COMMAND --help lists its flags."


if __name__ == "__main__":
    main()
