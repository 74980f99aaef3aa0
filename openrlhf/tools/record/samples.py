"""A few samples, printed for a reader."""

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openrlhf.api import Decode, Trajectory, best_to_worst, decode_response, format_number, shorten

SAMPLES_PRINTED = 4


def few_samples(trajectories: Sequence[Trajectory], limit: int = SAMPLES_PRINTED) -> list[Trajectory]:
    """Returns trajectories evenly spaced from best to worst reward, then failures if there is room."""
    return [trajectories[i] for i in best_to_worst([t.reward for t in trajectories], limit)]


def print_samples(samples: Sequence[Trajectory], decode: Decode, *, stream: TextIO | None = None) -> None:
    """Prints samples as a table on a terminal, as plain lines in a file."""
    stream = stream or sys.stdout
    rows = [
        (
            "–" if t.reward is None else format_number(t.reward),
            f"{t.num_actions}{' cut' if t.truncated else ''}",
            shorten(t.prompt.text, 300, keep_end=True),
            shorten(decode_response(t, decode) if t.ok else f"{t.outcome.value}: {t.error}", 500),
        )
        for t in samples
    ]
    if stream.isatty():
        _print_rich(rows, stream)
        return
    for reward, tokens, prompt, answer in rows:
        print(f"--- reward {reward}  tokens {tokens}", file=stream)
        print(f"prompt: {prompt}\nanswer: {answer}", file=stream, flush=True)


def _print_rich(rows: list[tuple[str, str, str, str]], stream: TextIO) -> None:
    table = Table(title="samples", show_lines=True, expand=True)
    table.add_column("reward", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("prompt", ratio=2)
    table.add_column("answer", ratio=3)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=stream).print(table)
