"""Prints samples of a journal: the facts of each, and its answer with coloured tokens."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from openrlhf.api import clean_text, format_number, read_label

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
    """Prints rows of a journal. `title`: name of their source, such as "step 12". `pieces`: for each row, the
    text of each token after the prompt; None: print answers as they are stored."""
    largest = max((abs(a) for row in rows for a in row["advantages"] or () if math.isfinite(a)), default=0.0)
    if pieces:
        _print(console, legend(largest))
    for i, row in enumerate(rows):
        _print(console, Text(clean_text(f"\n{title} · {headline(row)}"), style="bold"))
        for name, text in facts(row):
            _print(console, Text.assemble((f"{clean_text(name):<7} ", "dim"), clean_text(text)))
        answer = coloured(row, pieces[i], largest) if pieces else Text(clean_text(stored(row)))
        _print(console, Text.assemble((f"{'answer':<8}", "dim"), answer))


def _print(console: Console, text: Text) -> None:
    """Prints text without wrapping it, which is left to the terminal."""
    console.print(text, soft_wrap=True, highlight=False)


def headline(row: Row) -> str:
    part = f" part {row['part']}" if row["part"] else ""
    numbers = [f"{name} {format_number(row[name])}" for name in ("reward", "score") if row[name] is not None]
    if (advantage := mean_advantage(row)) is not None:
        numbers.append(f"advantage {advantage:+.3g}")
    versions = ", ".join(
        f"{run['version']}" + (f" ({run['count']} tokens)" if len(row["weight_versions"]) > 1 else "")
        for run in row["weight_versions"]
    )
    return " · ".join(
        [
            f"prompt {row['prompt_id']} sample {row['sample_index']}{part}",
            *numbers,
            row["outcome"],
            row["finish_reason"] + (", cut off" if row["truncated"] else ""),
            f"{len(row['rollout_log_probs'])} tokens",
            *([f"weights {versions}"] if versions else []),
            *([updates] if (updates := list_updates(row)) else []),
        ]
    )


def mean_advantage(row: Row) -> float | None:
    advantages = row["advantages"]
    return sum(advantages) / len(advantages) if advantages else None


def list_updates(row: Row) -> str:
    """Lists the optimizer steps that trained on the sample, with their ranks."""
    visits = zip(row["optimizer_steps"] or (), row["ranks"] or (), strict=True)
    return ", ".join(f"optimizer step {step} on rank {rank}" for step, rank in visits)


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


def stored(row: Row) -> str:
    return NOT_DECODED if row["response"] is None else row["response"]


def prompt_length(row: Row) -> int:
    """Returns the number of tokens before the first action."""
    return min((r["start"] for r in row["action_ranges"]), default=len(row["token_ids"]))


def coloured(row: Row, texts: Sequence[str], largest: float) -> Text:
    """Returns the answer with each token coloured by its advantage and dimmed by its probability."""
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
    """Returns the legend of the colours."""
    text = Text()
    if largest:
        scale = [("  ", f"on {shade}") for shade in (*reversed(BAD), *GOOD)]
        text = Text.assemble(f"advantage -{largest:.3g} ", *scale, f" +{largest:.3g}  ")
    text.append(f"sampling probability below {UNSURE}", style="dim")
    return text.append("  ").append("not sampled by the policy", style=NOT_CHOSEN)
