"""Asks what to train, with which model and data, on how many GPUs, and for the output folder. Writes a
commented configuration for `openrlhf plan`, `openrlhf check` and the run."""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.cli.arguments import ArgumentParser
from openrlhf.errors import ErrorCode, UsageError, short_errors

GPUS_OF_NODE = 8
"""Number of GPUs of a node; more GPUs are on several nodes."""
SAMPLES, SAMPLES_ON_CPU = 128, 8
"""Samples of an optimizer step, or prompts of an RL step. On GPUs they are rounded down to a multiple of the
number of GPUs, with at least one per GPU."""
REWARD_FUNCTION = '''\
def reward_func(queries, prompts, labels):
    """Returns 1 for a response that contains the label, else 0. Replace this rule by your own.

    queries: prompt and response as text; labels: the column --data.label_key. Lists of the same length.
    """
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts)]
    rewards = [float(str(label) in response) for response, label in zip(responses, labels)]
    return {"rewards": rewards, "scores": rewards}
'''


@dataclass(frozen=True, slots=True)
class Recipe:
    summary: str
    command: str
    """The training command."""
    module: str
    """Module of the command, for launchers of ranks."""
    data: str
    """Description of a row of the dataset."""
    columns: Mapping[str, tuple[str, ...]]
    """Role of a column -> its usual names, the default first."""
    reward: str = ""
    """Question for the source of rewards; empty for supervised commands."""
    default_reward: str = ""


CHATS = ("messages", "context_messages")
"""Usual names of columns with a whole chat."""
_PAIRS = {"chosen": ("chosen",), "rejected": ("rejected",)}
_INPUTS = ("prompt", "problem", "question", "instruction", "input", *CHATS)

RECIPES = {
    "sft": Recipe(
        summary="supervised fine-tuning",
        command="sft",
        module="train_sft",
        data="chats (messages), or prompts and responses",
        columns={"input": ("messages", *_INPUTS), "output": ("response", "answer", "output", "completion")},
    ),
    "dpo": Recipe(
        summary="preferences: DPO on pairs of answers",
        command="dpo",
        module="train_dpo",
        data="pairs (chosen, rejected)",
        columns=_PAIRS,
    ),
    "kto": Recipe(
        summary="preferences: KTO on single answers, good or bad",
        command="kto",
        module="train_kto",
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
        module="train_rm",
        data="pairs (chosen, rejected)",
        columns=_PAIRS,
    ),
    "rl": Recipe(
        summary="reinforcement learning with a verifier, a Python function",
        command="ppo",
        module="train_ppo_ray",
        data="prompts, and what the verifier compares with",
        columns={"input": _INPUTS, "label": ("answer", "label", "solution", "target")},
        reward="Python file with reward_func",
        default_reward="reward.py",
    ),
    "rl_rm": Recipe(
        summary="reinforcement learning with a reward model",
        command="ppo",
        module="train_ppo_ray",
        data="prompts",
        columns={"input": _INPUTS},
        reward="reward model",
    ),
}
"""Recipes by name. `openrlhf/recipes` has their templates."""


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="openrlhf init", description=__doc__, epilog="A question whose flag is given is not asked."
    )
    parser.add_argument("--what", choices=RECIPES, help="what to train")
    parser.add_argument("--model", help="model to start from: a Hugging Face name or a folder")
    parser.add_argument("--data", help="dataset: a file, a folder, a URL or a Hugging Face name")
    parser.add_argument("--gpus", type=_gpus, metavar="N", help="GPUs of all nodes together; 0: only a CPU")
    parser.add_argument("--output", help="output folder (default: ckpt/WHAT)")
    parser.add_argument(
        "--reward", help="with --what rl: file of the reward function; with rl_rm: reward model"
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
        answers = ask(options)
        recipe = RECIPES[answers["what"]]
        reward = Path(answers["reward"]) if answers["what"] == "rl" else None
        write(options.file, recipe, render(**answers), reward)
        print(next_steps(options.file, recipe, answers["gpus"]))


def ask(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the answers to all questions: from flags, else from the user, or with --yes the defaults."""
    question = Questions(asks=not options.yes)
    what = options.what
    if not what:
        listed = "\n".join(f"  {name:<6} {recipe.summary}" for name, recipe in RECIPES.items())
        what = question("--what", f"{listed}\nWhat do you want to train?", "", _recipe)
    recipe = RECIPES[what]
    model = options.model or question("--model", "Which model (a Hugging Face name, or a folder)?", "")
    data = options.data or question(
        "--data", f"Which dataset ({recipe.data}; a file, folder, URL or Hugging Face name)?", ""
    )
    reward = options.reward or ""
    if recipe.reward and not reward:
        reward = question("--reward", f"Which {recipe.reward}?", recipe.default_reward)
    gpus = options.gpus
    if gpus is None:
        gpus = question("--gpus", "How many GPUs on all nodes (0: only a CPU)?", str(gpus_here()), _gpus)
    output = options.output or question("--output", "Which output folder?", f"ckpt/{what}")
    return {
        "what": what,
        "model": model,
        "data": data,
        "reward": reward,
        "gpus": gpus,
        "output": output,
    }


class Questions:
    """Asks the user on the terminal."""

    def __init__(self, *, asks: bool) -> None:
        """`asks`: False takes the defaults without asking."""
        self._asks = asks

    def __call__(self, flag: str, text: str, default: str, convert: Callable[[str], Any] = str) -> Any:
        """Returns the converted answer, and asks again if it cannot be converted. Raises UsageError if there
        is neither an answer nor a default."""
        while self._asks:
            try:
                answer = input(f"{text} [{default}] " if default else f"{text} ").strip() or default
            except EOFError:
                print()
                break
            try:
                if answer:
                    return convert(answer)
            except (ValueError, argparse.ArgumentTypeError) as error:
                print(f"  {error}")
        if default:
            return convert(default)
        raise UsageError(ErrorCode.MISSING_FLAG, "required, but not set", flag=flag)


def _recipe(answer: str) -> str:
    if answer not in RECIPES:
        raise ValueError(f"please answer one of {', '.join(RECIPES)}")
    return answer


def _gpus(text: str) -> int:
    gpus = int(text) if text.isdecimal() else -1
    if gpus < 0 or (gpus > GPUS_OF_NODE and gpus % GPUS_OF_NODE):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number from 0 to {GPUS_OF_NODE} nor a multiple of {GPUS_OF_NODE}"
        )
    return gpus


def gpus_here() -> int:
    from openrlhf.device import gpu_names

    return len(gpu_names())


def render(*, what: str, model: str, data: str, reward: str, gpus: int, output: str) -> str:
    """Returns the configuration as YAML with comments."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

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
    values["columns"] = columns_of(RECIPES[what], data)
    return environment.get_template(f"{what}.yaml.j2").render(values).strip() + "\n"


def quoted(text: str) -> str:
    """Returns a text as a YAML value."""
    import yaml

    is_plain = re.fullmatch(r"[A-Za-z/][\w./-]*", text) and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text)


def columns_of(recipe: Recipe, data: str) -> dict[str, Any]:
    """Returns the column for each role; `chat`, True if answers are lists of messages; and `guess`, a remark
    for the comments that is empty if the first row of a local file has the columns."""
    row = first_row(Path(data))
    found: dict[str, Any] = {
        role: next((name for name in names if name in row), names[0])
        for role, names in recipe.columns.items()
    }
    is_chat = recipe.command == "sft" and found["input"] in CHATS and found["output"] not in row
    is_answered = _ends_with_answer(row.get(found.get("input", "")))
    if is_chat or (is_answered and "output" in found):
        found["output"] = ""  # the last message is the response
    is_known = all(name in row for name in found.values() if name)
    found["guess"] = "" if is_known else "; a guess: see your data"
    if is_answered and recipe.command == "ppo":
        found["guess"] = "; its last message is an answer, which the policy would continue: take it out"
    found["prompt"] = "prompt" if "prompt" in row else ""
    found["chat"] = not row or isinstance(row.get(found.get("chosen", "")), list)
    return found


def _ends_with_answer(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def first_row(path: Path) -> dict[str, Any]:
    """Returns the first row of a .jsonl file; {} for other data."""
    if path.suffix != ".jsonl" or not path.is_file():
        return {}
    with open(path, encoding="utf-8", errors="replace") as file:
        line = file.readline()
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def write(file: Path, recipe: Recipe, text: str, reward: Path | None = None) -> None:
    """Writes the file, and an example reward function if `reward` names a Python file that does not exist.
    Removes both again if the command does not accept the flags. Never replaces a file."""
    from openrlhf.cli.run_files import TRAINING
    from openrlhf.config.parse import parse

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
    """Writes a new file. Raises UsageError if that is not possible."""
    try:
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(ErrorCode.NOT_WRITABLE, reason, flag=flag, value=file) from error


def is_new_function(reward: Path) -> bool:
    """Returns whether a file is named that could exist and does not."""
    return reward.suffix == ".py" and reward.parent.is_dir() and not reward.exists()


def next_steps(file: Path, recipe: Recipe, gpus: int) -> str:
    """Returns the commands that check the file and start the run."""
    start = f"openrlhf {recipe.command} --config {file}"
    if recipe.command != "ppo" and gpus > 1:
        nodes = "" if gpus <= GPUS_OF_NODE else f" --nnodes {gpus // GPUS_OF_NODE} ..."
        ranks = min(gpus, GPUS_OF_NODE)
        start = f"torchrun --nproc_per_node {ranks}{nodes} -m openrlhf.cli.{recipe.module} --config {file}"
    lines = [
        f"  openrlhf plan {recipe.command} {file}    does it fit, how long does a step take?",
        f"  openrlhf check {recipe.command} {file}   data, template, rewards, disks",
        f"  {start}",
    ]
    return "next:\n" + "\n".join(lines)


if __name__ == "__main__":
    main()
