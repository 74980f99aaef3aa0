"""Builds pairs of answers to one prompt from rows, for reward models and DPO."""

import math
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.data.answers import AnswerColumns
from openrlhf.data.bad_rows import BadRow, BadRowAction, read_number
from openrlhf.data.encode import (
    Text,
    build_samples,
    finish,
    reason_to_skip,
    truncated,
)
from openrlhf.data.files import Row, kind
from openrlhf.data.image_rows import ImageColumn
from openrlhf.data.scored import cut_before_end, end_token_id, scored_answer
from openrlhf.data.sources import Rows
from openrlhf.data.store import Skip, Tokens, TwoSamples
from openrlhf.data.templates import PromptTemplate
from openrlhf.rows import Pair

SAME_ANSWERS = "both answers are the same"
SAME_WHEN_CUT = "both answers are the same up to max_len"


class PairDataset(TwoSamples[Pair]):
    """A dataset of preference pairs: sample 2i is the chosen answer of pair i, 2i + 1 the rejected one."""

    LABELS = ("margins", "ref_log_probs")

    margins: np.ndarray
    """(pairs,) float32, by how much the chosen score shall exceed the rejected one."""

    def item(self, i: int) -> Pair:
        return Pair(
            chosen=self.sample(2 * i),
            rejected=self.sample(2 * i + 1),
            margin=float(self.margins[i]),
            ref_log_probs=self.read_ref(i),
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

    A pair is skipped and counted when one side has nothing to learn, or a prompt of max_len - 2 tokens or
    more, or when both sides are the same, also if only after truncation.

    Raises UsageError for a bad row (see `read_each`), such as one whose answer a template does not render
    directly after its generation prompt (DPO), and when no pair is left.
    """
    answers = AnswerColumns(
        template=PromptTemplate(tokenizer, apply_chat_template, input_template),
        prompt_key=prompt_key,
        answer_keys=(chosen_key, rejected_key),
        remedy="remove --data.prompt_key to read whole conversations from the columns of the answers.",
        scored=scored_answer if score_last_token else None,
        images=images,
        tools_key=tools_key,
    )
    eos = end_token_id(tokenizer) if score_last_token else tokenizer.eos_token_id
    end = _end_scored if score_last_token else truncated

    def read(row: Row) -> tuple[tuple[Text, ...], float]:
        margin = 0.0 if margin_key is None else _margin(row, margin_key)
        return answers(row), margin

    def fit(_: int, sides: list[Tokens], margin: float) -> Sequence[Tokens] | Skip:
        for side in sides:
            finish(side, eos)
        cut = [end(side, max_len) for side in sides]
        return _reason_to_skip_pair(sides, cut, max_len) or cut

    store = PairDataset()
    margins = build_samples(
        *(store, rows, read, fit, tokenizer),
        max_len=max_len,
        bad_rows=bad_rows,
        images=images,
        unit="pair",
    )
    return store.with_labels(margins=np.array(margins, dtype=np.float32))


def _end_scored(tokens: Tokens, max_len: int) -> Tokens:
    """Truncates before the last token, which ends the text, and marks that token."""
    token_ids = cut_before_end(tokens[0], max_len)
    return token_ids, [False] * (len(token_ids) - 1) + [True]


def _reason_to_skip_pair(sides: Sequence[Tokens], cut: Sequence[Tokens], max_len: int) -> Skip | None:
    skips = [skip for _, learned in sides if (skip := reason_to_skip(learned, max_len))]
    chosen, rejected = (token_ids for token_ids, _ in sides)
    if chosen == rejected:
        skips.append(Skip(SAME_ANSWERS))
    elif cut[0][0] == cut[1][0]:
        skips.append(Skip(SAME_WHEN_CUT, max_len + 1))
    hopeless = [skip for skip in skips if not skip.needed_len]
    return next(iter(hopeless), max(skips, key=lambda skip: skip.needed_len, default=None))


def _margin(row: Row, column: str) -> float:
    margin = read_number(row, column)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise BadRow(f"column {column!r} is {margin!r} ({kind(margin)}), not a finite number.")
    return float(margin)
