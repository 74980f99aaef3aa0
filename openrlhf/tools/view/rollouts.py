"""Prints samples of an RL run, from its last step or any other, with tokens coloured by advantage."""

import argparse
import math
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.api import ErrorCode, UsageError, choose_hub, short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser, positive

if TYPE_CHECKING:
    from openrlhf.tools.view.rollout_view import Row

NAMES = ("step", "eval", "filtered")
ORDERS = ("reward", "score", "length")
MOST_LISTED = 20
"""Maximum number of names that an error lists."""


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf rollouts", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder (--logger.run_dir)")
    parser.add_argument("--step", type=int, metavar="N", help="RL step (default: the last)")
    parser.add_argument("--prompt", type=int, metavar="ID", help="only samples of this prompt_id")
    parser.add_argument("--failed", action="store_true", help="only samples without a reward")
    parser.add_argument(
        "--sort", choices=ORDERS, help="print the largest first (default: in the order of sampling)"
    )
    parser.add_argument(
        "--name",
        choices=NAMES,
        default="step",
        help="samples of a training step (default), of an evaluation, or dropped by dynamic filtering",
    )
    parser.add_argument(
        "--limit", type=positive, default=8, metavar="N", help="samples to print (default: 8)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        run(make_parser().parse_args(argv))


def run(options: argparse.Namespace) -> None:
    from rich.console import Console

    from openrlhf.api import read_rows
    from openrlhf.api import reading_run as reading
    from openrlhf.tools.command_line.terminal import shows_colours
    from openrlhf.tools.view.rollout_view import show

    coloured = shows_colours()
    console = Console(file=sys.stdout, force_terminal=coloured, color_system="auto" if coloured else None)
    steps = steps_of(options.run, options.name)
    step = options.step if options.step is not None else max(steps)
    if step not in steps:
        raise _not_found(f"there is no such step; the run has {_listed(list(steps))}", "--step", step)
    with reading(steps[step]):
        found, total = choose(steps, step, options)
        rows = read_rows(steps[step], found[: options.limit])
    pieces = pieces_of(options.run, rows) if coloured and rows else None
    show(console, f"{options.name} {step}", rows, pieces)
    tail = f"\n{len(rows)} of {len(found)} samples; {options.name} {step} had {total}"
    console.print(tail, highlight=False, soft_wrap=True)


def steps_of(folder: Path, name: str) -> dict[int, Path]:
    from openrlhf.api import RunIndex

    run = RunIndex(folder)
    if steps := run.rollouts(name):
        return steps
    if others := [other for other in NAMES if run.rollouts(other)]:
        raise _not_found(f"{folder} has no such rollouts; it has {', '.join(others)}", "--name", name)
    raise _not_found(f"has no rollouts; {run.runs_inside('rollouts')}", value=folder)


def choose(steps: dict[int, Path], step: int, options: argparse.Namespace) -> tuple[list[int], int]:
    """Returns the indices of the rows that the options select, in the order of --sort, and the step's number
    of samples. Raises UsageError if the step does not have the prompt."""
    from openrlhf.api import num_samples, read_table

    values = "rollout_log_probs" if options.sort == "length" else options.sort or "reward"
    table = read_table(steps[step], ["prompt_id", "outcome", values])
    prompts, outcomes = table["prompt_id"].to_pylist(), table["outcome"].to_pylist()
    if options.prompt is not None and options.prompt not in prompts:
        raise _not_found(no_such_prompt(steps, step, options.prompt), "--prompt", options.prompt)
    found = [
        i
        for i, outcome in enumerate(outcomes)
        if options.prompt in (None, prompts[i]) and not (options.failed and outcome == "ok")
    ]
    if options.sort == "length":
        lengths = [len(log_probs) for log_probs in table[values]]
        found.sort(key=lambda i: -lengths[i])
    elif options.sort:
        numbers = [math.nan if number is None else number for number in table[values].to_pylist()]
        found.sort(key=lambda i: (math.isnan(numbers[i]), -numbers[i]))
    return found, num_samples(table)


def no_such_prompt(steps: dict[int, Path], step: int, prompt: int) -> str:
    from openrlhf.api import read_table

    prompts_of = {
        n: set(read_table(path, ["prompt_id"])["prompt_id"].to_pylist()) for n, path in steps.items()
    }
    if elsewhere := [n for n, prompts in prompts_of.items() if prompt in prompts]:
        return f"not in step {step}; it is in {_listed(elsewhere)}"
    return f"in no step; step {step} has {_listed(sorted(prompts_of[step]))}"


def _not_found(text: str, flag: str = "", value: object = "") -> UsageError:
    return UsageError(ErrorCode.NOT_FOUND, text, flag=flag, value=value)


def pieces_of(folder: Path, rows: Sequence["Row"]) -> list[list[str]] | None:
    """Returns for each row the text of each token of its answer. Returns None and prints a note if the run's
    tokenizer is missing or does not reproduce the stored text."""
    try:
        return [token_texts(folder, row) for row in rows]
    except ValueError as error:
        print(f"note: answers are printed without colours: {error}", file=sys.stderr)
        return None


def token_texts(folder: Path, row: "Row") -> list[str]:
    """Returns the text of each token after the prompt. Raises ValueError if the run's tokenizer cannot be
    used or does not reproduce the stored text."""
    from openrlhf.api import decode_each
    from openrlhf.tools.view.rollout_view import prompt_length

    start = prompt_length(row)
    texts = decode_each(tokenizer_of(folder), row["token_ids"][start:], after=row["token_ids"][:start])
    if row.get("response") not in (None, "".join(texts)):
        raise ValueError("the tokenizer is not the run's, because it decodes the answer differently")
    return texts


@cache
def tokenizer_of(folder: Path) -> Any:
    """Loads the tokenizer of the model that the policy started from, or else of the final model. Raises
    UsageError if neither exists."""
    from openrlhf.api import RunFolder, load_tokenizer

    if not (config := RunFolder(folder).read_config()):
        raise _not_found("has no config.yaml, which names the run's tokenizer", value=folder)
    choose_hub(config.get("use_ms", False))
    use_fast = not config["data"].get("disable_fast_tokenizer", False)
    began, wrote = config["actor"]["model_name_or_path"], config["ckpt"]["output_dir"]
    try:
        return load_tokenizer(began, flag="--actor.model_name_or_path", use_fast=use_fast)
    except ValueError:
        if not Path(wrote).is_dir():
            raise
        return load_tokenizer(wrote, flag="--ckpt.output_dir", use_fast=use_fast)


def _listed(names: Sequence[Any]) -> str:
    """Joins names for an error message. From more than MOST_LISTED names it leaves some out before the
    last."""
    if len(names) <= MOST_LISTED:
        return ", ".join(map(str, names))
    return f"{', '.join(map(str, names[: MOST_LISTED - 1]))}, ... {names[-1]} ({len(names)} in all)"


if __name__ == "__main__":
    main()
