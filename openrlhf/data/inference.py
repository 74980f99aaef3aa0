"""Builds the items of batch inference from rows: questions to answer, and answers to score."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.data.answers import AnswerColumns, plain_answer
from openrlhf.data.bad_rows import BadRow, BadRowAction, check_embedded, read_each, read_value, refuse
from openrlhf.data.encode import Encoder, Text
from openrlhf.data.files import Row
from openrlhf.data.messages import join_text
from openrlhf.data.prompts import encode_prompts
from openrlhf.data.scored import score_answer, scored_answer
from openrlhf.data.sources import Rows
from openrlhf.data.templates import PromptTemplate, as_messages, check_media, read_tools
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.rows import Sample

logger = logging.getLogger(__name__)

Input = str | list[dict[str, Any]]
"""A prompt as in the dataset, without a template, so that a later run can apply its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    prompt_id: int
    input: Input
    token_ids: list[int]
    """Tokens of the prompt rendered in its template."""
    tools: dict[str, Any] = field(default_factory=dict)
    """The column of its tools, see `_tools_column`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    prompt_id: int
    input: Input
    output: Input
    sample: Sample
    """Prompt and answer; the only action is the last token, which carries the score."""
    kept: dict[str, Any] = field(default_factory=dict)
    """The columns of its tools, and of why it ended."""

    @property
    def key(self) -> tuple[int, int]:
        """(prompt_id, sample_index)"""
        return self.prompt_id, 0


def iteration(num_rows: int, iter: int | None, batch_size: int) -> range:
    """Returns the prompt numbers of an iteration. Number n is row n modulo `num_rows`, so iterations wrap
    around the dataset; iter None: every row once."""
    return range(num_rows) if iter is None else range(iter * batch_size, (iter + 1) * batch_size)


def build_questions(
    rows: Rows,
    numbers: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_key: str,
    apply_chat_template: bool,
    input_template: str | None,
    suffix: str | None,
    max_len: int,
    bad_rows: BadRowAction = "error",
    tools_key: str | None = None,
    missing: Mapping[int, str] = {},
) -> list[Question]:
    """Builds the questions with these numbers, which become their ids (see `iteration`).

    suffix: appended to each prompt before its template. A row is bad when its prompt is missing or null, when
    the chat template refuses it, when it has no token or more than max_len, or one without an embedding
    (`missing`).
    """
    template = PromptTemplate(tokenizer, apply_chat_template, input_template)
    chosen = rows.take([number % len(rows) for number in numbers])

    def read(row: Row) -> tuple[Input, dict[str, Any], str]:
        value = read_value(row, input_key, str, list)
        asked, tools = value, {}
        if apply_chat_template:
            asked, tools = as_messages(value), _tools_column(row, tools_key)
            check_media(asked, has_images=False)
        asked = asked if suffix is None else with_suffix(asked, suffix)
        return value, tools, template(asked, next(iter(tools.values()), None))

    skipped: Counter[str] = Counter()
    prompts = dict(read_each(chosen, read, bad_rows, skipped))
    texts = [text for *_, text in prompts.values()]
    encoded = encode_prompts(texts, tokenizer, is_chat=apply_chat_template)
    questions = []
    for (i, (value, tools, _)), token_ids in zip(prompts.items(), encoded, strict=True):
        try:
            check_embedded(token_ids, missing)
            if not 0 < len(token_ids) <= max_len:
                text = f"the prompt has {len(token_ids)} tokens; --data.prompt_max_len allows 1 to {max_len}."
                raise BadRow(text, ErrorCode.TOO_LONG)
        except BadRow as reason:
            refuse(chosen, i, reason, bad_rows, skipped)
        else:
            questions.append(Question(prompt_id=numbers[i], input=value, token_ids=token_ids, tools=tools))
    _check_left(len(questions), skipped.total(), chosen)
    return questions


def build_answers(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_key: str,
    output_key: str,
    apply_chat_template: bool,
    input_template: str | None,
    max_len: int,
    bad_rows: BadRowAction = "error",
    tools_key: str | None = None,
    missing: Mapping[int, str] = {},
) -> list[Answer]:
    """Builds every row as a reward model reads it: prompt and answer in their template, with an
    end-of-sequence token where the answer does not end with one. A text of more than max_len tokens is
    truncated before that token, as in the training of reward models. An answer whose `finish_reason` is
    length has no end, as in RL. `missing`: see `build_questions`."""
    template = PromptTemplate(tokenizer, apply_chat_template, input_template)
    keys = {"prompt_key": input_key, "answer_keys": (output_key,), "tools_key": tools_key}
    columns = AnswerColumns(template=template, **keys)

    def read(row: Row) -> tuple[Input, Input, dict[str, Any], Text]:
        value, output = read_value(row, input_key, str, list), read_value(row, output_key, str, list)
        ended = {key: row[key] for key in ("finish_reason",) if key in row}
        if apply_chat_template:
            read_row = replace(columns, scored=partial(scored_answer, is_open=_is_cut(row)))
            return value, output, _tools_column(row, tools_key) | ended, read_row(row)[0]
        if not isinstance(output, str):
            raise BadRow(f"column {output_key!r} holds messages, which need --data.apply_chat_template.")
        return value, output, ended, plain_answer(template(value), output)

    skipped: Counter[str] = Counter()
    read_texts, answers = dict(read_each(rows, read, bad_rows, skipped)), []
    encoded = Encoder(tokenizer)(text for *_, text in read_texts.values())
    for (i, (value, output, kept, _)), (token_ids, _) in zip(read_texts.items(), encoded, strict=True):
        try:
            check_embedded(token_ids, missing)
        except BadRow as reason:
            refuse(rows, i, reason, bad_rows, skipped)
        else:
            sample = score_answer(token_ids, tokenizer, max_len, truncated=_is_cut(kept))
            answers.append(Answer(prompt_id=i, input=value, output=output, sample=sample, kept=kept))
    _check_left(len(answers), skipped.total(), rows)
    return answers


def _is_cut(row: Row) -> bool:
    """Returns True if an answer of batch inference was cut off by its token limit."""
    return row.get("finish_reason") == "length"


def _tools_column(row: Row, key: str | None) -> dict[str, Any]:
    """Returns the column of a row's tools, which the row of its answer has too; empty without any."""
    return {str(key): tools} if (tools := read_tools(row, key)) else {}


def with_suffix(value: Input, suffix: str) -> Input:
    """Appends a space, `suffix` stripped, and a space to the prompt or its last message, as
    `--reward.template` does. Raises BadRow if the last message is not text."""
    if isinstance(value, str):
        return f"{value} {suffix.strip()} "
    *others, last = as_messages(value)
    if (text := join_text(last.get("content"))) is None:
        raise BadRow("the last message is not text, so nothing can be appended to it.")
    return [*others, last | {"content": with_suffix(text, suffix)}]


def fingerprint(items: Iterable[Question | Answer]) -> str:
    """Returns a digest that changes when a prompt, an answer, a template or a number does."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        token_ids = item.token_ids if isinstance(item, Question) else item.sample.token_ids.tolist()
        digest.update(json.dumps([item.prompt_id, item.input, token_ids]).encode())
    return digest.hexdigest()


def _check_left(left: int, skipped: int, rows: Rows) -> None:
    if skipped:
        logger.warning("%d of %d rows were skipped", skipped, len(rows))
    if not left:
        text = f"all {len(rows)} rows were skipped; the warnings before name the first of them."
        raise UsageError(ErrorCode.NO_ROWS, text, value=rows.place(0)[0])
