"""Joins a prompt and its answer into one text and marks the answer's characters."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Self

from transformers import PreTrainedTokenizerBase

from openrlhf.data.bad_rows import BadRow, read_value
from openrlhf.data.encode import Text
from openrlhf.data.files import Row
from openrlhf.data.messages import decoded, is_blank, is_learned, join_text, read_calls, read_text
from openrlhf.data.shown import check_shown
from openrlhf.data.templates import (
    Message,
    PromptTemplate,
    Tools,
    as_messages,
    check_ends,
    check_media,
    ending,
    joined,
    read_tools,
    render_messages,
    thoughts_apart,
)
from openrlhf.errors import ErrorCode, UsageError, warn_once

if TYPE_CHECKING:
    from openrlhf.data.image_rows import ImageColumn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerColumns:
    """Reads the prompt and the answers of rows: for each answer a text of both in which the answer is
    marked."""

    template: PromptTemplate
    prompt_key: str | None
    """Column of the prompt; None: the columns of answers hold whole conversations, of which the last message
    is the answer, or plain texts."""
    answer_keys: tuple[str, ...]
    remedy: str = "name columns that follow one another."
    """Remedy where prompt and answer overlap."""
    scored: "Callable[[Sequence[Message], int, PreTrainedTokenizerBase, Tools | None], Text] | None" = None
    """Writes and marks answers that are only scored, not learned, as `scored_answer` does."""
    multiturn: bool = False
    """Whether every assistant turn of the conversation is marked."""
    images: "ImageColumn | None" = None
    """Column of images, which a chat template writes as placeholders."""
    tools_key: str | None = None
    """Column of the tools that a chat template lists, see `read_tools`."""

    @classmethod
    def of(cls, template: PromptTemplate, input_key: str, output_key: str | None, **options: Any) -> Self:
        """Reads one answer: the column `output_key`, or without one the last message of `input_key`."""
        if output_key is not None:
            remedy = "name a column with whole conversations by --data.input_key, without --data.output_key."
            keys = {"prompt_key": input_key, "answer_keys": (output_key,), "remedy": remedy}
            return cls(template=template, **keys, **options)
        return cls(template=template, prompt_key=None, answer_keys=(input_key,), **options)

    def __call__(self, row: Row) -> tuple[Text, ...]:
        tokenizer, are_several = self.template.tokenizer, len(self.answer_keys) > 1
        if not self.template.apply_chat_template:
            asked = self.prompt_key
            prompt = "" if asked is None else self.template(read_value(row, asked, str))
            texts = [plain_answer(prompt, read_value(row, key, str)) for key in self.answer_keys]
            return tuple(text if prompt or are_several else replace(text, spans=()) for text in texts)
        talks, first = self._conversations(row)
        talks = [[thoughts_apart(message, tokenizer) for message in talk] for talk in talks]
        for talk in talks:
            check_ends(talk, tokenizer)
            check_media(talk, has_images=self.images is not None)
        if self.images is not None:
            talks = [self.images.place(row, talk) for talk in talks]
        tools = read_tools(row, self.tools_key)
        first, mark = (0 if self.multiturn else first), self.scored or mark_answer
        for talk in talks:
            learned = [i for i in range(first, len(talk)) if is_learned(talk[i])]
            if talk[0]["role"] == "assistant" and 0 in learned:
                text = "the conversation begins with an answer, which nothing asks for."
                raise BadRow(f'{text}\nTake it out of the row, or give it "weight": 0.')
            check_shown(talk, tokenizer, tools, learned)
        return tuple(mark(talk, first, tokenizer, tools) for talk in talks)

    def _conversations(self, row: Row) -> tuple[list[list[Message]], int]:
        """Returns the conversation with each answer, and the number of messages in their common prompt."""
        if self.prompt_key is None:
            talks = [self._messages(row, key, "user", is_whole=True) for key in self.answer_keys]
            _check_same_prompt(talks, self.answer_keys)
            return talks, len(talks[0]) - 1
        prompt = self._messages(row, self.prompt_key, "user")
        answers = [self._messages(row, key, "assistant") for key in self.answer_keys]
        named = zip(self.answer_keys, answers, strict=True)
        talks = [joined(prompt, answer, self.prompt_key, key, self.remedy) for key, answer in named]
        return talks, len(prompt)

    def _messages(self, row: Row, column: str, role: str, *, is_whole: bool = False) -> list[Message]:
        """Returns a column as messages; a text, which is no whole conversation, becomes one message of
        `role`."""
        value = read_value(row, column, str, list)
        are_several = len(self.answer_keys) > 1
        if is_whole and isinstance(read_text(value), str):
            text = f"column {column!r} is text; without --data.prompt_key it must be a list of messages."
            raise BadRow(text) if are_several else _no_answer(row, column)
        try:
            return as_messages(value, role)
        except BadRow as reason:
            if not are_several:
                raise
            raise BadRow(f"column {column!r}: {reason}") from reason


def _check_same_prompt(talks: Sequence[Sequence[Message]], columns: Sequence[str]) -> None:
    first, *others = (talk[:-1] for talk in talks)
    for column, other in zip(columns[1:], others, strict=True):
        for number, (one, another) in enumerate(zip_longest(first, other), start=1):
            if one != another:
                raise BadRow(
                    f"message {number} of {columns[0]!r} and {column!r} differs, so they are not two answers "
                    "to one prompt."
                )


def _no_answer(row: Row, input_key: str) -> UsageError:
    others = [column for column in row if column != input_key]
    has = f"The rows also have {', '.join(others)}" if others else "The rows have no other column"
    return UsageError(
        ErrorCode.MISSING_FLAG,
        f"not set, so the last message of column {input_key!r} would be the response, and that column is "
        f"text,\nnot messages. {has}; name the column with the response.",
        flag="--data.output_key",
    )


def plain_answer(prompt: str, answer: str) -> Text:
    """Returns prompt and answer end to end, with the answer marked and its trailing line breaks removed."""
    text = prompt + answer.rstrip("\r\n")
    return Text(text=text, spans=((len(prompt), len(text)),) if text[len(prompt) :].strip() else ())


def mark_answer(
    messages: Sequence[Message], first: int, tokenizer: PreTrainedTokenizerBase, tools: Tools | None = None
) -> Text:
    """Returns the conversation up to the last marked turn. Each assistant turn from message `first` on is
    marked, unless its weight is 0. A turn's span runs from the end of the generation prompt before it to the
    end of the turn as the template renders it, without trailing whitespace, because the policy does not write
    that. The text ends with the last marked turn.

    Raises BadRow if the template does not render one of these turns directly after its generation prompt, or
    renders it differently once other messages follow.
    """
    every = assistant_turns(messages, first)
    turns = [turn for turn in every if is_learned(messages[turn])]
    messages = messages[: (turns or every)[-1] + 1]
    render = partial(render_messages, tokenizer=tokenizer, tools=tools)
    whole = render(messages, add_generation_prompt=False)
    text, spans = whole.rstrip(), []
    for turn in turns:
        prompt = render(messages[:turn], add_generation_prompt=True)
        ended = render(messages[: turn + 1], add_generation_prompt=False).rstrip()
        content, calls = messages[turn].get("content"), read_calls(messages[turn])
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        words = [(join_text([part]) or "").strip() for part in parts]
        names = [str(call.get("name")) for call in calls]
        broken = [given for call in calls if isinstance(given := decoded(call.get("arguments")), str)]
        is_shown = all(word in text[len(prompt) : len(ended)] for word in words + names + broken)
        if not (whole.startswith(prompt) and text.startswith(ended) and is_shown):
            raise _rewritten(turn, len(messages), has_several=len(turns) > 1)
        if len(prompt) < len(ended) and not is_blank(messages[turn]):
            spans.append((len(prompt), len(ended)))
            has_end = not ended.endswith(words[-1]) if words and words[-1] else ending(tokenizer)[0].strip()
            if turn != turns[-1] and not has_end:
                warn_once(logger, ENDLESS, str(tokenizer.chat_template))
    return Text(text=text, spans=tuple(spans), is_chat=True)


ENDLESS = (
    "--data.apply_chat_template: the template writes no end after an answer that is not the last, so the "
    "model\nlearns to stop only at the last answer. Use a template that ends every turn "
    "(--data.tokenizer_chat_template),\nor one row for each reply without --data.multiturn."
)


def _rewritten(turn: int, num_messages: int, *, has_several: bool) -> BadRow:
    message = f"the assistant's message {turn + 1} of {num_messages}"
    if has_several:
        text = (
            f"the template renders {message}, or those before it,\ndifferently once other messages follow, "
            "so the loss would be on text that the policy never writes. Use a\ntemplate that keeps messages "
            "unchanged (--data.tokenizer_chat_template), or one row for each reply without --data.multiturn."
        )
    else:
        text = (
            f"the template does not render {message} unchanged and\ndirectly after the generation prompt, so "
            "the loss would be on another text. Write the message\nas the template does, or use a template "
            "that keeps it unchanged (--data.tokenizer_chat_template)."
        )
    return BadRow(text, ErrorCode.CHAT_TEMPLATE)


def assistant_turns(messages: Sequence[Message], first: int) -> list[int]:
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        place = "the last message is not" if first else "no message is"
        raise BadRow(
            f"{place} from the assistant (role {messages[-1]['role']!r}): there is nothing to learn."
        )
    return turns
