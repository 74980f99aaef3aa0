"""Asks what to train, with which model and data, on how many GPUs, and for the output folder. Writes a
commented configuration for `openrlhf plan`, `openrlhf check` and the run."""

import argparse
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from openrlhf.api import (
    ErrorCode,
    UsageError,
    config_json,
    describe,
    gpu_names,
    holds_model,
    looks_local,
    parse,
    readable,
    reward_function,
    short_errors,
    split_spec,
    unwritable,
)
from openrlhf.api import missing_flag as missing
from openrlhf.tools.command_line.arguments import ArgumentParser
from openrlhf.tools.command_line.run_files import TRAINING

GPUS_OF_NODE = 8
"""Number of GPUs of a node; more GPUs are on several nodes."""
SAMPLES, SAMPLES_ON_CPU = 128, 8
"""Samples of an optimizer step, or prompts of an RL step. On GPUs they are rounded down to a multiple of the
number of GPUs, with at least one per GPU."""
REWARD_FUNCTION = '''\
from openrlhf.utils import grade_response


def reward_func(queries, prompts, labels):
    """Returns 1 for a response with the label's final answer, else 0. Replace this rule by your own.

    queries: prompt and response as text; labels: the column --data.label_key. Lists of the same length.
    """
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts)]
    rewards = [float(grade_response(response, str(label))) for response, label in zip(responses, labels)]
    return {"rewards": rewards, "scores": rewards}
'''


@dataclass(frozen=True, slots=True)
class Recipe:
    summary: str
    command: str
    """The training command."""
    data: str
    """Description of a row of the dataset."""
    columns: Mapping[str, tuple[str, ...]]
    """Role of a column -> its usual names, the default first."""
    reward: str = ""
    """Question for the source of rewards; empty for supervised commands."""
    default_reward: str = ""
    settings: tuple[str, ...] = ()
    """Lines of the configuration that select a named algorithm; empty: those of the template."""


CHATS = ("messages", "conversations", "context_messages")
"""Usual names of columns with a whole chat."""
_PAIRS = {"chosen": ("chosen",), "rejected": ("rejected",)}
_INPUTS = ("prompt", "problem", "question", "instruction", "input", *CHATS)

RECIPES = {
    "sft": Recipe(
        summary="supervised fine-tuning",
        command="sft",
        data="chats (messages), or prompts and responses",
        columns={"input": ("messages", *_INPUTS), "output": ("response", "answer", "output", "completion")},
    ),
    "dpo": Recipe(
        summary="preferences: DPO on pairs of answers",
        command="dpo",
        data="pairs (chosen, rejected)",
        columns=_PAIRS,
    ),
    "kto": Recipe(
        summary="preferences: KTO on single answers, good or bad",
        command="kto",
        data="prompts, answers and labels",
        columns={
            "input": _INPUTS,
            "output": ("completion", "response", "answer", "output"),
            "label": ("label",),
        },
    ),
    "rm": Recipe(
        summary="a reward model from pairs of answers",
        command="rm",
        data="pairs (chosen, rejected)",
        columns=_PAIRS,
    ),
    "rl": Recipe(
        summary="reinforcement learning with a verifier, a Python function",
        command="ppo",
        data="prompts, and what the verifier compares with",
        columns={"input": _INPUTS, "label": ("answer", "label", "solution", "target")},
        reward="Python file with reward_func",
        default_reward="reward.py",
    ),
    "rl_rm": Recipe(
        summary="reinforcement learning with a reward model",
        command="ppo",
        data="prompts",
        columns={"input": _INPUTS},
        reward="reward model",
    ),
}
"""Recipes by name. `openrlhf/recipes` has their templates."""

ALGORITHMS = {
    "ppo": "gae",
    "grpo": "group_norm, actor.loss_aggregation: sample_mean, algo.kl.init_coef: 0.04, "
    "algo.kl.use_loss: true, algo.kl.estimator: k3",
    "dr_grpo": "dr_grpo, actor.loss_aggregation: constant_length, algo.kl.init_coef: 0",
    "dapo": "group_norm, actor.eps_clip_low_high: [0.2, 0.28], algo.dynamic_filtering_enable: true, "
    "algo.kl.init_coef: 0",
    "gspo": "group_norm, actor.policy_loss_type: gspo, actor.eps_clip_low_high: [0.0003, 0.0004], "
    "algo.kl.init_coef: 0",
    "cispo": "group_norm, actor.policy_loss_type: cispo, actor.eps_clip_low_high: [1.0, 4.0], "
    "algo.kl.init_coef: 0",
    "rloo": "rloo",
    "reinforce++": "reinforce",
    "reinforce++-baseline": "reinforce_baseline, algo.kl.use_loss: true, algo.kl.estimator: k2",
}
"""Named algorithms of docs/algorithms.md -> estimator, and the other settings."""
RECIPES |= {
    name: replace(
        RECIPES["rl"],
        summary=f"reinforcement learning with a verifier: {name}, as docs/algorithms.md defines it",
        settings=tuple(re.split(r", (?=[a-z]+\.)", f"algo.advantage.estimator: {settings}")),
    )
    for name, settings in ALGORITHMS.items()
}


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="openrlhf init", description=__doc__, epilog="A question whose flag is given is not asked."
    )
    parser.add_argument("--what", metavar=f"{{{','.join(RECIPES)}}}", help="what to train")
    parser.add_argument("--model", help="model to start from: a Hugging Face name or a folder")
    parser.add_argument("--data", help="dataset: a file, a folder, a URL or a Hugging Face name")
    parser.add_argument("--gpus", metavar="N", help="GPUs of all nodes together; 0: only a CPU")
    parser.add_argument("--output", help="output folder (default: ckpt/WHAT)")
    parser.add_argument(
        "--reward", help="with rl_rm: reward model; with other RL: file of the reward function"
    )
    parser.add_argument(
        "--file", type=Path, default=Path("run.yaml"), help="file to write (default: run.yaml)"
    )
    parser.add_argument("--yes", action="store_true", help="ask nothing; take the defaults")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        options = make_parser().parse_args(argv)
        if options.file.exists():
            text = "exists already; name another file with --file, or remove it"
            raise UsageError(ErrorCode.CONFLICT, text, flag="--file", value=options.file)
        if not options.file.parent.is_dir():
            text = "its folder does not exist"
            raise UsageError(ErrorCode.NOT_WRITABLE, text, flag="--file", value=options.file)
        answers = ask(options)
        recipe = RECIPES[answers["what"]]
        reward = Path(answers["reward"]) if recipe.default_reward else None
        write(options.file, recipe, render(**answers), reward)
        print(next_steps(options.file, recipe, answers["gpus"]))


def ask(options: argparse.Namespace) -> dict[str, Any]:
    """Returns checked answers to all questions: from flags, else from the user, or with --yes defaults."""
    ask_for = partial(question, not options.yes)
    if options.what:
        what = _recipe(options.what)
    else:
        shown = [f"  {name:<6} {recipe.summary}" for name, recipe in RECIPES.items() if not recipe.settings]
        shown.append(f"  {', '.join(ALGORITHMS)}: rl with this algorithm")
        what = ask_for("--what", "\n".join([*shown, "What do you want to train?"]), "", _recipe)
    recipe = RECIPES[what]
    check_reward = _reward if recipe.default_reward else partial(_model, flag="--reward")
    asked: dict[str, tuple[str, str, Callable[[str], Any]]] = {
        "model": ("Which model (a Hugging Face name, or a folder)?", "", _model),
        "data": (f"Which dataset ({recipe.data}; a file, folder, URL or Hugging Face name)?", "", _data),
        "reward": (f"Which {recipe.reward}?", recipe.default_reward, check_reward),
        "gpus": ("How many GPUs on all nodes (0: only a CPU)?", "", _gpus),
        "output": ("Which output folder?", f"ckpt/{what}", _output),
    }
    if not recipe.reward:
        del asked["reward"]
    flags = {name: value for name in asked if (value := getattr(options, name)) is not None}
    answers = {name: asked[name][2](value) for name, value in flags.items()}
    for name, (text, default, check) in asked.items():
        if name not in answers:
            default = str(len(gpu_names())) if name == "gpus" else default
            answers[name] = ask_for(f"--{name}", text, default, check)
    data, row = answers.pop("data")
    return {"what": what, "data": data, "row": row, "reward": ""} | answers


def question(asks: bool, flag: str, text: str, default: str, check: Callable[[str], Any]) -> Any:
    """Returns the user's checked answer, or without `asks` the default. On a terminal a wrong one is told and
    asked for again; elsewhere, where the next line answers the next question, it raises UsageError, as does
    a question without answer and default."""
    while asks:
        try:
            answer = input(f"{text} [{default}] " if default else f"{text} ").strip()
        except EOFError:
            print()
            break
        try:
            if answer or default:
                return check(answer or default)
        except UsageError as error:
            if not sys.stdin.isatty():
                raise
            print(f"  {readable(' '.join(describe(error).split()))}")
    if default:
        return check(default)
    raise UsageError(ErrorCode.MISSING_FLAG, "required, but not set", flag=flag)


def _recipe(answer: str) -> str:
    """Returns the recipe of this name, which may be written in any way, such as "Dr. GRPO"."""
    plain = lambda name: re.sub(r"[^a-z+]", "", name.lower())
    if found := [name for name in RECIPES if plain(name) == plain(answer)]:
        return found[0]
    near = difflib.get_close_matches(answer, RECIPES, n=1)
    text = f"did you mean {near[0]}?" if near else f"please answer one of {', '.join(RECIPES)}"
    raise UsageError(ErrorCode.INVALID_VALUE, text, flag="--what", value=answer)


def _model(answer: str, flag: str = "--model") -> str:
    if os.path.isdir(answer):
        if not config_json(answer):
            text = "the folder has no config.json that can be read, so it holds no model"
            raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=answer)
    elif looks_local(answer):
        raise UsageError(ErrorCode.NOT_FOUND, missing(answer, answer), flag=flag, value=answer)
    return answer


def _data(answer: str) -> tuple[str, Mapping[str, Any]]:
    from openrlhf.api import first_row  # imports torch

    row = None
    for item in split_spec(answer):
        row = first_row(item, flag="--data")
    return answer, row or {}


def _reward(answer: str) -> str:
    from openrlhf.api import check_reward_file  # imports torch

    if is_new_function(Path(answer)) or answer.startswith(("http://", "https://")):
        return answer
    for problem in reward_function("reward", answer, alone="," not in answer):
        raise UsageError(problem.code, problem.text, flag="--reward", value=answer)
    check_reward_file(answer, "--reward")
    return answer


def _gpus(answer: str) -> int:
    gpus = int(answer) if answer.isdecimal() else -1
    if gpus < 0 or (gpus > GPUS_OF_NODE and gpus % GPUS_OF_NODE):
        text = f"neither a number from 0 to {GPUS_OF_NODE} nor a multiple of {GPUS_OF_NODE}"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag="--gpus", value=answer)
    return gpus


def _output(answer: str) -> str:
    if reason := "it holds a model already" if holds_model(answer) else unwritable(answer):
        text = f"cannot be written to: {reason}; name another folder"
        raise UsageError(ErrorCode.NOT_WRITABLE, text, flag="--output", value=answer)
    return answer


def render(
    *, what: str, model: str, data: str, reward: str, gpus: int, output: str, row: Mapping[str, Any]
) -> str:
    """Returns the configuration as YAML with comments. `row`: the first one of the data; {}: unknown."""
    environment = Environment(
        loader=PackageLoader("openrlhf", "recipes"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = quoted
    values: dict[str, Any] = {"model": model, "data": data, "reward": reward, "gpus": gpus, "output": output}
    values["nodes"] = max(1, gpus // GPUS_OF_NODE)
    values["batch"] = max(1, SAMPLES // gpus) * gpus if gpus else SAMPLES_ON_CPU
    recipe = RECIPES[what]
    values |= {"columns": guess_columns(recipe, row), "what": what, "settings": recipe.settings}
    template = "rl" if recipe.settings else what
    return environment.get_template(f"{template}.yaml.j2").render(values).strip() + "\n"


def quoted(text: str) -> str:
    is_plain = re.fullmatch(r"[A-Za-z/][\w./-]*", text) and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text)


def guess_columns(recipe: Recipe, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the column for each role; `chat`, True if answers are lists of messages; and `guess`, a remark
    for the comments that is empty if the dataset's first row has the columns. An empty row is not known."""
    from openrlhf.api import with_role  # imports torch

    found: dict[str, Any] = {
        role: next((name for name in names if name in row), names[0])
        for role, names in recipe.columns.items()
    }
    is_chat = recipe.command == "sft" and found["input"] in CHATS and found["output"] not in row
    asked = row.get(found.get("input", ""))
    last = with_role(asked[-1]) if isinstance(asked, list) and asked else None
    is_answered = isinstance(last, dict) and last.get("role") == "assistant"
    if is_chat or (is_answered and "output" in found):
        found["output"] = ""  # the last message is the response
    is_known = all(name in row for name in found.values() if name)
    seen = f"the data has {', '.join(row)}" if row else "see your data"
    found["guess"] = "" if is_known else f"; a guess: {seen}"
    if is_answered and recipe.command == "ppo":
        found["guess"] = "; its last message is an answer, which the policy would continue: take it out"
    found["prompt"] = "prompt" if "prompt" in row else ""
    found["chat"] = not row or isinstance(row.get(found.get("chosen", "")), list)
    return found


def write(file: Path, recipe: Recipe, text: str, reward: Path | None = None) -> None:
    """Writes the file, and an example reward function if `reward` names a Python file that does not exist.
    Removes both again if the command does not accept the flags. Never replaces a file."""
    command = next(command for command in TRAINING if command.name == recipe.command)
    with ExitStack() as undo:
        create(file, text, "--file")
        undo.callback(file.unlink)
        is_first = reward is not None and is_new_function(reward)
        if reward is not None and is_first:
            create(reward, REWARD_FUNCTION, "--reward")
            undo.callback(reward.unlink)
        parse(command, ["--config", str(file)])
        undo.pop_all()
    if is_first:
        print(f"wrote {reward}: a reward function; replace it by your own")
    print(f"wrote {file}: {recipe.summary}")


def create(file: Path, text: str, flag: str) -> None:
    try:
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(ErrorCode.NOT_WRITABLE, reason, flag=flag, value=file) from error


def is_new_function(reward: Path) -> bool:
    return reward.suffix == ".py" and reward.parent.is_dir() and not reward.exists()


def next_steps(path: Path, recipe: Recipe, gpus: int) -> str:
    file = shlex.quote(str(path))
    start = f"openrlhf {recipe.command} --config {file}"
    if recipe.command != "ppo" and gpus > 1:
        nodes = "" if gpus <= GPUS_OF_NODE else f" --nnodes {gpus // GPUS_OF_NODE} ..."
        ranks = min(gpus, GPUS_OF_NODE)
        module = f"openrlhf.cli.train_{recipe.command}"
        start = f"torchrun --nproc_per_node {ranks}{nodes} -m {module} --config {file}"
    lines = [
        f"  openrlhf plan {recipe.command} {file}    does it fit, how long does a step take?",
        f"  openrlhf check {recipe.command} {file}   data, template, rewards, disks",
        f"  {start}",
    ]
    return "next:\n" + "\n".join(lines)


if __name__ == "__main__":
    main()
