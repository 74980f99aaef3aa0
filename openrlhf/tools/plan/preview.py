"""Previews the data of a supervised run (`openrlhf data preview`): first samples, tokens with a loss, packed
rows, and lengths."""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TextIO

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from openrlhf.api import (
    Pair,
    Sample,
    Steps,
    UnpairedExample,
    build_train_set,
    checked_supervised_task,
    clean_text,
    counted,
    decode,
    first_token_ids,
    lay_out,
    load_run_tokenizer,
    tracked,
)
from openrlhf.api import SupervisedTask as Task
from openrlhf.tools.command_line.run_files import find_task_type
from openrlhf.tools.command_line.terminal import shows_colours

Item = Sample | Pair | UnpairedExample | Steps

UNITS = {Sample: "sample", Pair: "pair", UnpairedExample: "answer", Steps: "solution"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive tokens that all have a loss or all have none, and are all special or all ordinary."""

    text: str
    learned: bool
    special: bool
    label: str = ""
    """Label of the step, for process reward models."""


class TokenSequence(NamedTuple):
    """One sequence of an item."""

    title: str
    sample: Sample
    spans: Sequence[Span]


def list_sequences(item: Item, tokenizer: PreTrainedTokenizerBase) -> list[TokenSequence]:
    if isinstance(item, Pair):
        margin = f", better by {item.margin:g}" if item.margin else ""
        return [
            _sequence(f"chosen{margin}", item.chosen, tokenizer),
            _sequence("rejected", item.rejected, tokenizer),
        ]
    if isinstance(item, UnpairedExample):
        return [
            _sequence("good" if item.desirable else "bad", item.sample, tokenizer),
            _sequence("mismatched answer, for the KL estimate", item.mismatched, tokenizer),
        ]
    if isinstance(item, Steps):
        labels = [
            f"{label:.3g}" if item.labels.is_floating_point() else decode(tokenizer, [label])
            for label in item.labels.tolist()
        ]
        return [_sequence("", item.sample, tokenizer, labels)]
    return [_sequence("", item, tokenizer)]


def _sequence(
    title: str, sample: Sample, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str] | None = None
) -> TokenSequence:
    return TokenSequence(title, sample, list(split_spans(sample, tokenizer, labels)))


def split_spans(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str] | None = None
) -> Iterator[Span]:
    """Yields the spans of a sample, whose texts add up to the decoded sample. `labels`: label of each
    token with a loss, which is then a separate span; None if there are no labels."""
    token_ids, mask = sample.token_ids.tolist(), sample.action_mask.tolist()
    special_ids = {*tokenizer.all_special_ids} | {
        token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    left = iter(labels or ())

    def alike(i: int) -> tuple[bool, bool, int]:
        return mask[i], token_ids[i] in special_ids, i if labels is not None and mask[i] else -1

    stop = written = 0
    for (learned, special, _), group in groupby(range(len(token_ids)), alike):
        stop += len(list(group))
        text = decode(tokenizer, token_ids[:stop])
        if stop < len(token_ids):  # a character that is not complete belongs to the span that completes it
            text = text.rstrip("\ufffd")
        label = next(left) if labels is not None and learned else ""
        yield Span(text=text[written:], learned=learned, special=special, label=label)
        written = len(text)


def plain_text(sequence: TokenSequence) -> str:
    """Returns the text with tokens that have a loss between ⟦ and ⟧, and labels in parentheses behind."""
    parts = []
    for learned, group in groupby(sequence.spans, lambda span: (span.learned, span.label)):
        text = "".join(span.text for span in group)
        parts.append(f"⟦{text}⟧" + (f"({learned[1]})" if learned[1] else "") if learned[0] else text)
    return _shown("".join(parts))


def coloured_text(sequence: TokenSequence) -> Text:
    text = Text()
    for span in sequence.spans:
        style = ("green" if span.learned else "dim") + (" reverse" if span.special else "")
        text.append(_shown(span.text), style=style)
        if span.label:
            text.append(f" {clean_text(span.label)} ", style="bold black on yellow")
    return text


def _shown(text: str) -> str:
    """Replaces repetitions of a special token, such as those of an image, by one with a count."""
    times = lambda found: f"{found[1]}×{len(found[0]) // len(found[1])}"
    return clean_text(_REPEATED.sub(times, text))


_REPEATED = re.compile(r"(<[^<>\s]+>)\1{3,}")


class Preview:
    """Prints a preview in colour (tokens with a loss green, others grey, special tokens reversed) or as plain
    text."""

    def __init__(self, stream: TextIO, *, coloured: bool):
        self._stream = stream
        self._console = Console(file=stream, force_terminal=True) if coloured else None

    def first_tokens(self, tokenizer: PreTrainedTokenizerBase, *, is_chat: bool) -> None:
        """Prints the tokens that the tokenizer prepends to a text, if any."""
        if first := decode(tokenizer, first_token_ids(tokenizer)):
            plain = f"the tokenizer adds {first} at the beginning of every text"
            chat = (
                f"the tokenizer adds {first} at the beginning of plain text; in a chat the template decides"
            )
            self.line(f"{chat if is_chat else plain}\n")

    def item(self, number: int, item: Item, tokenizer: PreTrainedTokenizerBase) -> None:
        sequences = list_sequences(item, tokenizer)
        name = f"{UNITS[type(item)]} {number}"
        if self._console is None:
            for sequence in sequences:
                self.line(f"--- {name}: {_heading(sequence)}\n{plain_text(sequence)}\n")
            return
        table = Table(box=None, expand=True)
        for sequence in sequences:
            table.add_column(Text(_heading(sequence), style="bold"), ratio=1, overflow="fold")
        table.add_row(*(coloured_text(sequence) for sequence in sequences))
        self._console.print(Panel(table, title=Text(name), title_align="left"))

    def rows(self, rows: Sequence[Sequence[int]], dataset: Any, limit: int = 4) -> None:
        """Prints the packed rows (indices of items) of the first optimizer step on one rank."""
        unit = UNITS[type(dataset[0])]
        self.line(f"first step: {sum(map(len, rows))} {unit}s in {len(rows)} packed rows")
        for i, row in enumerate(rows[:limit], start=1):
            tokens = sum(dataset.lengths[item] for item in row)
            learned = sum(_num_learned(dataset[item]) for item in row)
            self.line(f"  row {i}: {counted(len(row), unit)}, {tokens:,} tokens, {learned:,} learned")
        if len(rows) > limit:
            self.line(f"  and {len(rows) - limit} more")
        self.line("")

    def summary(self, dataset: Any) -> None:
        unit = UNITS[type(dataset[0])]
        lengths = np.array(dataset.lengths)
        items = tracked(range(len(dataset)), len(dataset), f"counting {unit}s")
        learned = sum(_num_learned(dataset[i]) for i in items)
        total, skipped = int(lengths.sum()), dataset.skipped
        reasons = "".join(f"\n    {count:,} {reason}" for reason, count in skipped.items())
        if dataset.needed_len:
            reasons += f"\n    --data.max_len {dataset.needed_len} would keep every row whole"
        self.line(
            f"{len(dataset) + skipped.total():,} rows: {counted(len(dataset), unit)}, "
            f"{skipped.total():,} dropped, {dataset.truncated:,} cut at max_len{reasons}\n"
            f"{total:,} tokens, {learned:,} learned ({learned / total:.1%})\n"
        )
        shares = {"median": 50, "90%": 90, "99%": 99, "longest": 100}
        found = {n: np.percentile(lengths, share, method="inverted_cdf") for n, share in shares.items()}
        listed = ", ".join(f"{name} {value:,}" for name, value in found.items())
        article = "an" if unit == "answer" else "a"
        self.line(f"tokens of {article} {unit}: mean {lengths.mean():,.1f}, {listed}")
        bins = histogram(lengths)
        most = max(count for _, _, count in bins)
        for low, high, count in bins:
            self.line(f"  {f'{low:,}-{high:,}':>15} {'█' * math.ceil(BAR_WIDTH * count / most)} {count:,}")

    def line(self, text: str) -> None:
        if self._console is None:
            print(text, file=self._stream)
        else:
            self._console.print(Text(text))


BAR_WIDTH = 40


def histogram(lengths: np.ndarray, bins: int = 8) -> list[tuple[int, int, int]]:
    """Returns (shortest, longest, count) for `bins` ranges of lengths with equal widths."""
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, math.ceil((high - low + 1) / bins))
    counts = np.bincount((lengths - low) // width)
    starts = [low + i * width for i in range(len(counts))]
    return [(n, min(n + width - 1, high), int(count)) for n, count in zip(starts, counts, strict=True)]


def _heading(sequence: TokenSequence) -> str:
    title = f"{sequence.title}, " if sequence.title else ""
    return f"{title}{counted(sequence.sample.length, 'token')}, {sequence.sample.num_actions:,} learned"


def _num_learned(item: Item) -> int:
    if isinstance(item, Pair):
        return item.chosen.num_actions + item.rejected.num_actions
    return (item if isinstance(item, Sample) else item.sample).num_actions


def preview(name: str, config: Any, num_samples: int, no_color: bool) -> None:
    task = checked_supervised_task(partial(find_task_type, name), config)
    show(task, num_samples=num_samples, coloured=not no_color and shows_colours())


def show(task: Task, *, num_samples: int, coloured: bool) -> None:
    """Prints samples, rows and a summary of the dataset, which is built as for training, with the same
    cache."""
    config = task.config
    tokenizer = load_run_tokenizer(config)
    dataset = build_train_set(task, tokenizer)
    screen = Preview(sys.stdout, coloured=coloured)
    screen.first_tokens(tokenizer, is_chat=getattr(config.data, "apply_chat_template", False))
    for i in range(min(num_samples, len(dataset))):
        screen.item(i + 1, dataset[i], tokenizer)
    mini_batches = lay_out(task, dataset, batch_size=config.train.batch_size, shuffle=True)
    screen.rows(next(mini_batches.items(0)), dataset)
    screen.summary(dataset)
