"""Entry point `openrlhf`: imports only the module of the given command, and runs it."""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from openrlhf.errors import ErrorCode, UsageError, short_errors

COMMANDS = {
    "init": ("init", "ask a few questions and write a commented configuration for a training run"),
    "demo": ("demo", "train a tiny model on a built-in task, on this machine, in minutes"),
    "sft": ("train_sft", "supervised fine-tuning"),
    "rm": ("train_rm", "train a reward model on pairs of answers"),
    "prm": ("train_prm", "train a process reward model on labelled steps"),
    "dpo": ("train_dpo", "preference optimization (DPO, IPO, cDPO) on pairs of answers"),
    "kto": ("train_kto", "KTO on single answers labelled good or bad"),
    "kd": ("train_kd", "knowledge distillation from a teacher model"),
    "ppo": ("train_ppo_ray", "reinforcement learning: PPO, GRPO, RLOO, ... with Ray and vLLM"),
    "plan": ("plan", "predict memory, time and batches of a training run from its configuration"),
    "check": ("check", "check a training run before it starts, and list all problems"),
    "rehearse": ("rehearse", "run a training command in minutes on CPU cores, with shrunk models"),
    "doctor": ("doctor", "examine the installation or a run: causes of problems, evidence, remedies"),
    "verify": ("verify", "compare a run's loss, gradient, engine and checkpoints with references"),
    "data": ("data", "data preview: show the samples that a supervised command would train on"),
    "rollouts": ("rollouts", "print samples of an RL run, with tokens coloured by advantage"),
    "replay": ("replay", "compute a step of a recorded run again, and compare it bit for bit"),
    "bisect": ("bisect", "find the first difference between two recorded runs, or two commits"),
    "watch": ("watch", "show a run on one screen: steps, phases, curves, samples, warnings"),
    "view": ("view", "serve a local web page of runs: curves side by side, and every rollout"),
    "agent": ("agent", "agent try: play episodes of an agent and print them turn by turn"),
    "batch_inference": ("batch_inference", "answer the prompts of a dataset, or score its answers"),
    "chat": ("interactive_chat", "chat with a model"),
    "serve_rm": ("serve_rm", "serve a reward model over HTTP"),
    "lora_combiner": ("lora_combiner", "merge a LoRA adapter into its base model"),
    "completion": ("completion", "print a script that completes commands and flags in bash, zsh or fish"),
}
"""Command -> (module of `openrlhf.cli`, summary for `--help`)."""


def main(argv: Sequence[str] | None = None) -> None:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        import_module(f"openrlhf.cli.{COMMANDS[name][0]}").main(rest)
        return
    with short_errors():
        _tell(name)


def _tell(name: str) -> None:
    if name in ("--help", "-h", "help"):
        print(_usage())
    elif name == "--version":
        print(f"openrlhf {metadata.version('openrlhf')}")
    else:
        modules = {module: command for command, (module, _) in COMMANDS.items()}
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
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
