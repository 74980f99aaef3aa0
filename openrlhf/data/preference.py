"""Builds pairs of answers to one prompt from rows, for reward models and DPO."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.data.answers import mark_answer, plain_answer, scored_answer
from openrlhf.data.bad_rows import BadRow, BadRowAction, value_of
from openrlhf.data.encode import (
    Text,
    Tokens,
    check_left,
    cut_before_end,
    cut_image,
    end_token_id,
    finish,
    read_tokens,
    reason_to_drop,
)
from openrlhf.data.files import Row, kind
from openrlhf.data.image_rows import ImageColumn
from openrlhf.data.labelled import TwoSamples
from openrlhf.data.messages import read_text
from openrlhf.data.sources import Rows
from openrlhf.data.store import Drop, SampleStore
from openrlhf.data.templates import Message, PromptTemplate, as_messages, check_ends, joined, tools_of
from openrlhf.types import Pair

SAME_ANSWERS = "both answers are the same"
SAME_WHEN_CUT = "both answers are the same up to max_len"


@dataclass(frozen=True, kw_only=True, eq=False)
class PairDataset(TwoSamples):
    """A dataset of preference pairs: sample 2i is the chosen answer of pair i, 2i + 1 the rejected one."""

    margins: np.ndarray
    """(pairs,) float32, by how much the chosen score shall exceed the rejected one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.samples) != 2 * len(self.margins):
            raise ValueError(f"{len(self.samples)} samples for {len(self.margins)} pairs")

    def __getitem__(self, i: int) -> Pair:
        i = range(len(self))[i]
        return Pair(
            chosen=self.samples[2 * i],
            rejected=self.samples[2 * i + 1],
            margin=float(self.margins[i]),
            ref_log_probs=self.ref_of(i),
        )


def build_pairs(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str | None,
    chosen_key: str,
    rejected_key: str,
    apply_chat_template: bool,
    input_template: str | None,
    max_len: int,
    score_last_token: bool,
    margin_key: str | None = None,
    bad_rows: BadRowAction = "error",
    images: ImageColumn | None = None,
    tools_key: str | None = None,
) -> PairDataset:
    """Builds one pair from each row whose two answers differ within max_len tokens.

    no chat template   input_template.format(prompt) precedes both texts; without `prompt_key` they
                       stand alone.
    chat template      A text is one message, lists of messages are used as they are: the prompt, and what
                       each answer adds to it. Without `prompt_key` both are whole conversations, equal but
                       for the last message, which is the answer.
    score_last_token   False (DPO): the answers' tokens are marked, as `build_sft_samples` marks them, and a
                       sequence truncated at max_len has no end. True (reward models): only the last token
                       is marked; it is the end-of-sequence token, also where the text is truncated for it.
    margin_key         Column with a number: by how much the scores shall differ.
    images, tools_key  As in `build_sft_samples`: both answers are to the same images, with the same tools.

    A pair is dropped and counted when one side has nothing to learn, or a prompt of max_len - 2 tokens or
    more, or when both sides are the same, also if only after truncation.

    Raises UsageError for a bad row (see `read_each`), for a template that does not render an answer directly
    after its generation prompt (DPO), and when no pair is left.
    """
    template = PromptTemplate(tokenizer, apply_chat_template, input_template)
    columns = (chosen_key, rejected_key)
    eos = end_token_id(tokenizer) if score_last_token else tokenizer.eos_token_id

    def read(row: Row) -> tuple[tuple[Text, ...], float]:
        margin = 0.0 if margin_key is None else _margin(row, margin_key)
        if not apply_chat_template:
            prompt = "" if prompt_key is None else template(value_of(row, prompt_key, str))
            return tuple(plain_answer(prompt, value_of(row, column, str)) for column in columns), margin
        mark = scored_answer if score_last_token else mark_answer
        talks, first = _conversations(row, prompt_key, columns)
        for talk in talks:
            check_ends(talk, tokenizer)
        if images is not None:
            talks = [images.place(row, talk) for talk in talks]
        tools = tools_of(row, tools_key)
        return tuple(mark(talk, first, tokenizer, tools) for talk in talks), margin

    end = _end_scored if score_last_token else _end_learned
    store, margins = SampleStore(), []
    for i, sides, margin in read_tokens(rows, read, tokenizer, bad_rows, store.dropped, images):
        for side in sides:
            finish(side, eos)
        cut = [end(side, max_len) for side in sides]
        longest = max(len(token_ids) for token_ids, _ in sides)
        drop = _reason_to_drop_pair(sides, cut, max_len)
        drop = drop or next(filter(None, (cut_image(images, side, max_len) for side in sides)), None)
        if drop:
            store.drop(replace(drop, needed_len=drop.needed_len and max(drop.needed_len, longest)))
            continue
        if longest > max_len:
            store.cut(longest)
        for token_ids, action_mask in cut:
            store.append(token_ids, action_mask, None if images is None else i)
        margins.append(margin)
    check_left(store, rows, max_len, unit="pair")
    return PairDataset(samples=store, margins=np.array(margins, dtype=np.float32))


def _end_learned(tokens: Tokens, max_len: int) -> Tokens:
    token_ids, learned = tokens
    return token_ids[:max_len], learned[:max_len]


def _end_scored(tokens: Tokens, max_len: int) -> Tokens:
    """Truncates before the last token, which ends the text, and marks that token."""
    token_ids = cut_before_end(tokens[0], max_len)
    return token_ids, [False] * (len(token_ids) - 1) + [True]


def _reason_to_drop_pair(sides: Sequence[Tokens], cut: Sequence[Tokens], max_len: int) -> Drop | None:
    drops = [drop for _, learned in sides if (drop := reason_to_drop(learned, max_len))]
    chosen, rejected = (token_ids for token_ids, _ in sides)
    if chosen == rejected:
        drops.append(Drop(SAME_ANSWERS))
    elif cut[0][0] == cut[1][0]:
        drops.append(Drop(SAME_WHEN_CUT, max_len + 1))
    hopeless = [drop for drop in drops if not drop.needed_len]
    return next(iter(hopeless), max(drops, key=lambda drop: drop.needed_len, default=None))


def _margin(row: Row, column: str) -> float:
    margin = value_of(row, column)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise BadRow(f"column {column!r} is {margin!r} ({kind(margin)}), not a finite number.")
    return float(margin)


def _conversations(
    row: Row, prompt_key: str | None, columns: Sequence[str]
) -> tuple[list[list[Message]], int]:
    """Returns the conversation with each answer, and the number of messages in their common prompt."""
    if prompt_key is None:
        talks = [_whole_conversation(row, column) for column in columns]
        _check_same_prompt(talks, columns)
        return talks, len(talks[0]) - 1
    prompt = _messages(row, prompt_key, "user")
    answers = [_messages(row, column, "assistant") for column in columns]
    remedy = "remove --data.prompt_key to read whole conversations from the columns of the answers."
    named = zip(columns, answers, strict=True)
    return [joined(prompt, answer, prompt_key, key, remedy) for key, answer in named], len(prompt)


def _whole_conversation(row: Row, column: str) -> list[Message]:
    if isinstance(read_text(row.get(column)), str):
        raise BadRow(f"column {column!r} is text; without --data.prompt_key it must be a list of messages.")
    return _messages(row, column, "user")


def _messages(row: Row, column: str, role: str) -> list[Message]:
    """Returns a column as messages; a text becomes one message of `role`."""
    value = value_of(row, column, str, list)
    try:
        return as_messages(value, role)
    except BadRow as reason:
        raise BadRow(f"column {column!r}: {reason}") from reason


def _check_same_prompt(talks: Sequence[Sequence[Message]], columns: Sequence[str]) -> None:
    chosen, rejected = (talk[:-1] for talk in talks)
    for number, (one, other) in enumerate(zip_longest(chosen, rejected), start=1):
        if one != other:
            raise BadRow(
                f"message {number} of {columns[0]!r} and {columns[1]!r} differs, so they are not two answers "
                "to one prompt."
            )
