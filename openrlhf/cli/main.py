"""Entry point `openrlhf`: imports the module of the given command, and only that, and runs it."""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from openrlhf.errors import ErrorCode, UsageError, short_errors

COMMANDS = {
    "init": ("init", "ask five questions and write a configuration with comments for a training run"),
    "demo": ("demo", "train a tiny model on a built-in task, on this machine, in minutes"),
    "sft": ("train_sft", "supervised fine-tuning"),
    "rm": ("train_rm", "train a reward model on pairs of answers"),
    "prm": ("train_prm", "train a process reward model on labelled steps"),
    "dpo": ("train_dpo", "preference optimization (DPO, IPO, cDPO) on pairs of answers"),
    "kto": ("train_kto", "KTO on single answers labelled good or bad"),
    "kd": ("train_kd", "knowledge distillation from a teacher model"),
    "ppo": ("train_ppo_ray", "reinforcement learning with Ray, vLLM and DeepSpeed"),
    "plan": ("plan", "predict memory, time and batches of a training run from its configuration"),
    "check": ("check", "check a training run before it starts, and list everything that is wrong"),
    "rehearse": ("rehearse", "run a training command in minutes on CPU cores, with shrunk models"),
    "doctor": ("doctor", "examine the installation or a run, and name what is wrong, why, and the remedy"),
    "verify": ("verify", "prove on this machine that a run's model is trained as transformers computes it"),
    "data": ("data", "data preview: show the samples that a supervised command would train on"),
    "rollouts": ("rollouts", "print samples of an RL run, with tokens coloured by advantage"),
    "replay": ("replay", "compute a step of a recorded run again, and compare it bit for bit"),
    "bisect": ("bisect", "find the first difference between two recorded runs, or two commits"),
    "watch": ("watch", "show a run on one screen: steps, phases, curves, samples, warnings"),
    "view": ("view", "a local web page of runs: curves side by side, and every rollout"),
    "agent": ("agent", "agent try: play one episode of an agent and print it turn by turn"),
    "batch_inference": ("batch_inference", "answer the prompts of a dataset, or score its answers"),
    "chat": ("interactive_chat", "chat with a model"),
    "serve_rm": ("serve_rm", "serve a reward model over HTTP"),
    "lora_combiner": ("lora_combiner", "merge a LoRA adapter into its base model"),
    "completion": ("completion", "print a script that completes commands and flags in bash, zsh or fish"),
}
"""Command -> (module of `openrlhf.cli`, summary for `--help`)."""


def main(argv: Sequence[str] | None = None) -> None:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("--help", "-h", "help"):
        print(_usage())
    elif name == "--version":
        print(f"openrlhf {metadata.version('openrlhf')}")
    elif name in COMMANDS:
        import_module(f"openrlhf.cli.{COMMANDS[name][0]}").main(rest)
    else:
        modules = {module: command for command, (module, _) in COMMANDS.items()}
        near = difflib.get_close_matches(name, [*COMMANDS, *modules], n=1, cutoff=0.5)
        remedy = (
            f"did you mean `openrlhf {modules.get(near[0], near[0])}`?" if near else "see `openrlhf --help`"
        )
        text = f"there is no such command; {remedy}"
        with short_errors():
            raise UsageError(ErrorCode.UNKNOWN_FLAG, text, flag="openrlhf", value=repr(name))


def _usage() -> str:
    lines = [f"  openrlhf {name:<15} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: openrlhf COMMAND [--section.flag VALUE ...]",
            "",
            *lines,
            "",
            "openrlhf COMMAND --help lists its flags.",
        ]
    )


if __name__ == "__main__":
    main()
