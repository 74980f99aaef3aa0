"""Prints samples of an RL run (`openrlhf rollouts`)."""

import argparse
import math
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from openrlhf.api import (
    ErrorCode,
    RunIndex,
    UsageError,
    choose_hub,
    decode,
    num_samples,
    read_rows,
    read_table,
)
from openrlhf.api import reading_run as reading
from openrlhf.tools.command_line.runs import find_run
from openrlhf.tools.command_line.terminal import shows_colours
from openrlhf.tools.view.flags import NAMES
from openrlhf.tools.view.rollout_view import Row, prompt_length, show

MOST_LISTED = 20
"""Maximum number of names that an error lists."""


def run(options: argparse.Namespace) -> None:
    coloured = shows_colours()
    console = Console(file=sys.stdout, force_terminal=coloured, color_system="auto" if coloured else None)
    options.run = find_run(options.run)
    steps = find_steps(options.run, options.name)
    step = options.step if options.step is not None else max(steps)
    if step not in steps:
        raise _not_found(f"there is no such step; the run has {_listed(list(steps))}", "--step", step)
    with reading(steps[step]):
        found, total = choose(steps, step, options)
        rows = read_rows(steps[step], found[: options.limit])
    pieces = decode_pieces(options.run, rows) if coloured and rows else None
    show(console, f"{options.name} {step}", rows, pieces)
    tail = f"\n{len(rows)} of {len(found)} samples; {options.name} {step} had {total}"
    console.print(tail, highlight=False, soft_wrap=True)


def find_steps(folder: Path, name: str) -> dict[int, Path]:
    run = RunIndex(folder)
    if steps := run.rollouts(name):
        return steps
    if others := [other for other in NAMES if run.rollouts(other)]:
        raise _not_found(f"{folder} has no such rollouts; it has {', '.join(others)}", "--name", name)
    raise _not_found(f"has no rollouts; {run.runs_inside('rollouts')}", value=folder)


def choose(steps: dict[int, Path], step: int, options: argparse.Namespace) -> tuple[list[int], int]:
    """Returns the indices of the rows that the options select, in the order of --sort, and the step's number
    of samples. Raises UsageError if the step does not have the prompt."""
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
    prompts_of = {
        n: set(read_table(path, ["prompt_id"])["prompt_id"].to_pylist()) for n, path in steps.items()
    }
    if elsewhere := [n for n, prompts in prompts_of.items() if prompt in prompts]:
        return f"not in step {step}; it is in {_listed(elsewhere)}"
    return f"in no step; step {step} has {_listed(sorted(prompts_of[step]))}"


def _not_found(text: str, flag: str = "", value: object = "") -> UsageError:
    return UsageError(ErrorCode.NOT_FOUND, text, flag=flag, value=value)


def decode_pieces(folder: Path, rows: Sequence[Row]) -> list[list[str]] | None:
    """Returns for each row the text of each token of its answer. Returns None and prints a note if the run's
    tokenizer is missing or does not reproduce the stored text."""
    try:
        return [token_texts(folder, row) for row in rows]
    except ValueError as error:
        print(f"note: answers are printed without colours: {error}", file=sys.stderr)
        return None


def token_texts(folder: Path, row: Row) -> list[str]:
    """Returns the text of each token after the prompt. Raises ValueError if the run's tokenizer cannot be
    used or does not reproduce the stored text."""
    start = prompt_length(row)
    texts = decode_each(load_run_tokenizer(folder), row["token_ids"][start:], after=row["token_ids"][:start])
    if row.get("response") not in (None, "".join(texts)):
        raise ValueError("the tokenizer is not the run's, because it decodes the answer differently")
    return texts


LONGEST_CHARACTER = 4
"""Bytes, and so tokens, of the longest UTF-8 character."""


def decode_each(tokenizer: Any, token_ids: Sequence[int], *, after: Sequence[int] = ()) -> list[str]:
    """Returns the text that each token adds; joined they are `decode(token_ids, after=after)`. A character of
    several tokens is in the text of its last token."""
    whole, texts = [*after, *token_ids], []
    before, start = 0, len(after)  # start of the last whole-character tokens, and of those after
    for end in range(start + 1, len(whole) + 1):
        text = decode(tokenizer, whole[start:end], after=whole[before:start])
        is_part = text.endswith("\ufffd") and end < len(whole) and end - start < LONGEST_CHARACTER
        texts.append("" if is_part else text)
        if not is_part:
            before, start = start, end
    return texts


@cache
def load_run_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer of the model that the policy started from, or else of the final model. Raises
    UsageError if neither exists."""
    from openrlhf.api import RunFolder, load_tokenizer  # imports transformers

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
