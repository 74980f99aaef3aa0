"""Prints samples of an RL run (`openrlhf rollouts`)."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from openrlhf.api import (
    ErrorCode,
    RunIndex,
    UsageError,
    choose_hub,
    clean_text,
    decode,
    format_number,
    num_samples,
    read_label,
    read_rows,
    read_table,
)
from openrlhf.api import reading_run as reading
from openrlhf.tools.command_line.runs import PlacedRun, find_run
from openrlhf.tools.command_line.terminal import colour_console, say
from openrlhf.tools.view.flags import NAMES

MOST_LISTED = 20
"""Maximum number of names that an error lists."""
Row = Mapping[str, Any]

UNSURE = 0.5
"""Sampling probability below which a token is dim."""
GOOD = ("#133d22", "#19572f", "#20733d", "#278f4c")
BAD = ("#471a17", "#66221e", "#862b26", "#a7332d")
"""Background colours, from small advantages to the largest one shown."""
NOT_CHOSEN = "italic cyan"
NOT_DECODED = "(not decoded)"


def show(
    console: Console, title: str, rows: Sequence[Row], pieces: Sequence[Sequence[str]] | None = None
) -> None:
    """Prints rows. `pieces`: for each the text of each token after the prompt; None: the stored answers."""
    largest = max((abs(a) for row in rows for a in row["advantages"] or () if math.isfinite(a)), default=0.0)
    if pieces:
        say(console, legend(largest))
    for i, row in enumerate(rows):
        say(console, f"\n{title} · {headline(row)}", "bold")
        for name, text in facts(row):
            say(console, Text.assemble((f"{clean_text(name):<7} ", "dim"), clean_text(text)))
        stored = NOT_DECODED if row["response"] is None else row["response"]
        answer = coloured(row, pieces[i], largest) if pieces else Text(clean_text(stored))
        say(console, Text.assemble((f"{'answer':<8}", "dim"), answer))


def headline(row: Row) -> str:
    part = f" part {row['part']}" if row["part"] else ""
    numbers = [f"{name} {format_number(row[name])}" for name in ("reward", "score") if row[name] is not None]
    if advantages := row["advantages"]:
        numbers.append(f"advantage {sum(advantages) / len(advantages):+.3g}")
    versions = ", ".join(
        f"{run['version']}" + (f" ({run['count']} tokens)" if len(row["weight_versions"]) > 1 else "")
        for run in row["weight_versions"]
    )
    visits = zip(row["optimizer_steps"] or (), row["ranks"] or (), strict=True)
    updates = ", ".join(f"optimizer step {step} on rank {rank}" for step, rank in visits)
    return " · ".join(
        [
            f"prompt {row['prompt_id']} sample {row['sample_index']}{part}",
            *numbers,
            row["outcome"],
            row["finish_reason"] + (", cut off" if row["truncated"] else ""),
            f"{len(row['rollout_log_probs'])} tokens",
            *([f"weights {versions}"] if versions else []),
            *([updates] if updates else []),
        ]
    )


def facts(row: Row) -> list[tuple[str, str]]:
    label = read_label(row)
    logs = " · ".join(f"{log['name']} {format_number(log['value'])}" for log in row["extra_logs"])
    named = {
        "error": row["error"],
        "logs": logs,
        "label": "" if label is None else label if isinstance(label, str) else row["label"],
        "prompt": row["prompt"],
    }
    said = ((text["name"], text["value"]) for text in row.get("extra_texts") or ())
    return [(name, text) for name, text in (*named.items(), *said) if text]


def prompt_length(row: Row) -> int:
    return min((r["start"] for r in row["action_ranges"]), default=len(row["token_ids"]))


def coloured(row: Row, texts: Sequence[str], largest: float) -> Text:
    start, styles = prompt_length(row), [NOT_CHOSEN] * len(texts)
    log_probs = row["rollout_log_probs"]
    advantages = row["advantages"] or [0.0] * len(log_probs)
    chosen = (i - start for r in row["action_ranges"] for i in range(r["start"], r["end"]))
    for i, advantage, log_prob in zip(chosen, advantages, log_probs, strict=True):
        styles[i] = choose_style(advantage, log_prob, largest)
    answer = Text()
    for style, run in groupby(zip(styles, texts, strict=True), lambda pair: pair[0]):
        answer.append(clean_text("".join(text for _, text in run)), style=style)
    return answer


def choose_style(advantage: float, log_prob: float, largest: float) -> str:
    dim = " dim" if log_prob < math.log(UNSURE) else ""
    if advantage == 0 or not math.isfinite(advantage):
        return dim.strip()
    shades = GOOD if advantage > 0 else BAD
    shade = shades[max(1, math.ceil(abs(advantage) / largest * len(shades))) - 1]
    return f"white on {shade}{dim}"


def legend(largest: float) -> Text:
    text = Text()
    if largest:
        scale = [("  ", f"on {shade}") for shade in (*reversed(BAD), *GOOD)]
        text = Text.assemble(f"advantage -{largest:.3g} ", *scale, f" +{largest:.3g}  ")
    text.append(f"sampling probability below {UNSURE}", style="dim")
    return text.append("  ").append("not sampled by the policy", style=NOT_CHOSEN)


def run(options: argparse.Namespace) -> None:
    console = colour_console(sys.stdout)
    options.run = find_run(options.run)
    steps = find_steps(options.run, options.name)
    step = options.step if options.step is not None else max(steps)
    if step not in steps:
        raise _not_found(f"there is no such step; the run has {_listed(list(steps))}", "--step", step)
    with reading(steps[step]):
        found, total = choose(steps, step, options)
        rows = read_rows(steps[step], found[: options.limit])
    pieces = decode_pieces(options.run, rows) if console.is_terminal and rows else None
    show(console, f"{options.name} {step}", rows, pieces)
    say(console, f"\n{len(rows)} of {len(found)} samples; {options.name} {step} had {total}")


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
    from openrlhf.api import load_tokenizer  # imports transformers

    run = PlacedRun(folder)
    if not (config := run.read_config()):
        raise _not_found("has no config.yaml, which names the run's tokenizer", value=folder)
    choose_hub(config.get("use_ms", False))
    use_fast = not config["data"].get("disable_fast_tokenizer", False)
    began, wrote = map(run.locate, (config["actor"]["model_name_or_path"], config["ckpt"]["output_dir"]))
    try:
        return load_tokenizer(began, flag="--actor.model_name_or_path", use_fast=use_fast)
    except ValueError:
        if not Path(wrote).is_dir():
            raise
        return load_tokenizer(wrote, flag="--ckpt.output_dir", use_fast=use_fast)


def _listed(names: Sequence[Any]) -> str:
    """Joins names for an error message, but some of more than MOST_LISTED."""
    if len(names) <= MOST_LISTED:
        return ", ".join(map(str, names))
    return f"{', '.join(map(str, names[: MOST_LISTED - 1]))}, ... {names[-1]} ({len(names)} in all)"
