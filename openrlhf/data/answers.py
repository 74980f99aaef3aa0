"""Joins a prompt and its answer into one text and marks the answer's characters."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from openrlhf.data.bad_rows import BadRow, value_of
from openrlhf.data.encode import Text
from openrlhf.data.files import Row
from openrlhf.data.messages import calls_of, read_text, text_of
from openrlhf.data.templates import (
    Message,
    PromptTemplate,
    Tools,
    as_messages,
    check_ends,
    joined,
    render_messages,
    tools_of,
)
from openrlhf.errors import ErrorCode, UsageError, warn_once

if TYPE_CHECKING:
    from openrlhf.data.image_rows import ImageColumn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerColumns:
    """Reads the prompt and the answer of rows as one text in which the answer is marked."""

    template: PromptTemplate
    input_key: str
    output_key: str | None
    """Column of the answer; None: the last message of `input_key` is the answer."""
    multiturn: bool = False
    """Whether every assistant turn of the conversation is marked."""
    images: "ImageColumn | None" = None
    """Column of images, which a chat template writes as placeholders."""
    tools_key: str | None = None
    """Column of the tools that a chat template lists, see `tools_of`."""

    def __post_init__(self) -> None:
        """Raises UsageError if no flag says which column or message is the answer."""
        if self.output_key is None and not self.template.apply_chat_template:
            raise UsageError(
                ErrorCode.MISSING_FLAG,
                "not set, so there is no response to learn. Name its column; for conversations add\n"
                "--data.apply_chat_template, for plain text --model.pretrain_mode_enable.",
                flag="--data.output_key",
            )

    def __call__(self, row: Row) -> Text:
        tokenizer = self.template.tokenizer
        if not self.template.apply_chat_template:
            assert self.output_key is not None  # checked when it was made
            prompt = self.template(value_of(row, self.input_key, str))
            answer = value_of(row, self.output_key, str)
            return plain_answer(prompt, answer) if prompt else Text(text=answer)
        asked = read_text(value_of(row, self.input_key, str, list))
        if isinstance(asked, str) and self.output_key is None:
            raise _no_answer(row, self.input_key)
        messages = as_messages(asked)
        first = len(messages) - 1
        if self.output_key is not None:
            first += 1
            answer = as_messages(value_of(row, self.output_key, str, list), role="assistant")
            remedy = "name a column with whole conversations by --data.input_key, without --data.output_key."
            messages = joined(messages, answer, self.input_key, self.output_key, remedy)
        if self.images is not None:
            messages = self.images.place(row, messages)
        return mark_answer(messages, 0 if self.multiturn else first, tokenizer, tools_of(row, self.tools_key))


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
    """Returns prompt and answer end to end, with the answer marked and its trailing newlines removed."""
    text = prompt + answer.rstrip("\n")
    return Text(text=text, spans=((len(prompt), len(text)),) if text[len(prompt) :].strip() else ())


def mark_answer(
    messages: Sequence[Message], first: int, tokenizer: PreTrainedTokenizerBase, tools: Tools | None = None
) -> Text:
    """Returns the conversation up to the last assistant turn. Each assistant turn from message `first` on is
    marked. A turn's span runs from the end of the generation prompt before it to the end of the turn as
    the template renders it, without trailing whitespace, because the policy does not write that. The text
    ends with the last turn.

    Raises UsageError for a template that does not render one of these turns directly after its generation
    prompt, or renders it differently once other messages follow.
    """
    check_ends(messages, tokenizer)
    turns = _assistant_turns(messages, first)
    messages = messages[: turns[-1] + 1]
    render = partial(render_messages, tokenizer=tokenizer, tools=tools)
    whole = render(messages, add_generation_prompt=False)
    text, spans = whole.rstrip(), []
    for turn in turns:
        prompt = render(messages[:turn], add_generation_prompt=True)
        ended = render(messages[: turn + 1], add_generation_prompt=False).rstrip()
        content, calls = messages[turn].get("content"), calls_of(messages[turn])
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        words = [(text_of([part]) or "").strip() for part in parts]
        names = [str(call.get("name")) for call in calls]
        is_shown = all(word in text[len(prompt) : len(ended)] for word in words + names)
        if not (whole.startswith(prompt) and text.startswith(ended) and is_shown):
            raise _rewritten(turn, len(messages), has_several=len(turns) > 1)
        if len(prompt) < len(ended) and (content or calls):
            spans.append((len(prompt), len(ended)))
            if turn != turns[-1] and words and words[-1] and ended.endswith(words[-1]):
                warn_once(logger, ENDLESS, str(tokenizer.chat_template))
    return Text(text=text, spans=tuple(spans), is_chat=True)


ENDLESS = (
    "--data.apply_chat_template: the template writes no end after an answer that is not the last, so the "
    "model\nlearns to stop only at the last answer. Use a template that ends every turn "
    "(--data.tokenizer_chat_template),\nor one row for each reply without --data.multiturn."
)


def _rewritten(turn: int, num_messages: int, *, has_several: bool) -> UsageError:
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
    return UsageError(ErrorCode.CHAT_TEMPLATE, text, flag="--data.apply_chat_template")


def scored_answer(
    messages: Sequence[Message],
    first: int,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None = None,
    *,
    is_open: bool = False,
) -> Text:
    """Returns the conversation up to the last assistant turn, with everything after the prompt (the messages
    before `first`) marked. The text is only scored, not learned, so a template may render the answer in any
    way. `is_open`: the last turn was truncated and is rendered without an end."""
    turns = _assistant_turns(messages, first)
    render = partial(render_messages, tokenizer=tokenizer, tools=tools)
    prompt = render(messages[:first], add_generation_prompt=True)
    text = render(messages[: turns[-1] + 1], add_generation_prompt=False, is_open=is_open).rstrip("\n")
    start = len([*takewhile(bool, map(eq, prompt, text))])  # length of the common prefix
    is_empty = not any(messages[turn].get("content") or calls_of(messages[turn]) for turn in turns)
    return Text(text=text, spans=() if is_empty else ((start, len(text)),), is_chat=True)


def _assistant_turns(messages: Sequence[Message], first: int) -> list[int]:
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        place = "the last message is not" if first else "no message is"
        raise BadRow(
            f"{place} from the assistant (role {messages[-1]['role']!r}): there is nothing to learn."
        )
    return turns
