"""Joins a prompt and its answer into one text and marks the answer's characters."""

import logging
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from openrlhf.data.bad_rows import BadRow, value_of
from openrlhf.data.encode import Text
from openrlhf.data.files import Row
from openrlhf.data.templates import Message, as_messages, check_templates, render_messages, render_prompt

if TYPE_CHECKING:
    from openrlhf.data.image_rows import ImageColumn

logger = logging.getLogger(__name__)


def check_answer_flags(
    tokenizer: PreTrainedTokenizerBase,
    *,
    output_key: str | None,
    apply_chat_template: bool,
    input_template: str | None,
) -> None:
    """Raises ValueError for templates that cannot be used (see `check_templates`), and where no flag says
    which column or message is the answer."""
    check_templates(tokenizer, apply_chat_template=apply_chat_template, input_template=input_template)
    if output_key is None and not apply_chat_template:
        raise ValueError(
            "--data.output_key: not set, so there is no response to learn. Name its column;\n"
            "for conversations add --data.apply_chat_template, for plain text --model.pretrain_mode_enable."
        )


def read_answer(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_key: str,
    output_key: str | None,
    apply_chat_template: bool,
    input_template: str | None,
    multiturn: bool = False,
    images: "ImageColumn | None" = None,
) -> Text:
    """Returns the text of a row with its answer marked; with `multiturn` every assistant turn of the
    conversation is marked. Images are written as placeholders, which needs a chat template."""
    if apply_chat_template:
        asked = value_of(row, input_key, str, list)
        if isinstance(asked, str) and output_key is None:
            raise ValueError(_no_answer(row, input_key))
        messages = as_messages(asked)
        first = len(messages) - 1
        if output_key is not None:
            first += 1
            messages += as_messages(value_of(row, output_key, str, list), role="assistant")
        if images is not None:
            messages = images.place(row, messages)
        return mark_answer(messages, 0 if multiturn else first, tokenizer)
    assert output_key is not None  # ensured by check_answer_flags
    prompt = render_prompt(
        value_of(row, input_key, str), tokenizer, apply_chat_template=False, input_template=input_template
    )
    answer = value_of(row, output_key, str)
    return plain_answer(prompt, answer) if prompt else Text(text=answer)


def _no_answer(row: Row, input_key: str) -> str:
    others = [column for column in row if column != input_key]
    has = f"The rows also have {', '.join(others)}" if others else "The rows have no other column"
    return (
        f"--data.output_key: not set, so the last message of column {input_key!r} would be the response, and "
        f"that column is text,\nnot messages. {has}; name the column with the response."
    )


def plain_answer(prompt: str, answer: str) -> Text:
    """Returns prompt and answer end to end, with the answer marked and its trailing newlines removed."""
    text = prompt + answer.rstrip("\n")
    return Text(text=text, spans=((len(prompt), len(text)),) if text[len(prompt) :].strip() else ())


def mark_answer(messages: Sequence[Message], first: int, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Returns the conversation up to the last assistant turn, with each assistant turn from message `first`
    on marked. A turn's span runs from the end of the generation prompt before it to the end of the turn as
    the template renders it, without trailing whitespace, because the policy does not write that. The text
    ends with the last turn.

    Raises ValueError for a template that does not render one of these turns directly after its generation
    prompt, or renders it differently once other messages follow.
    """
    turns = _assistant_turns(messages, first)
    messages = messages[: turns[-1] + 1]
    whole = render_messages(messages, tokenizer, add_generation_prompt=False)
    text, spans = whole.rstrip(), []
    for turn in turns:
        prompt = render_messages(messages[:turn], tokenizer, add_generation_prompt=True)
        ended = render_messages(messages[: turn + 1], tokenizer, add_generation_prompt=False).rstrip()
        content = messages[turn].get("content")
        is_shown = not isinstance(content, str) or content.strip() in text[len(prompt) : len(ended)]
        if not (whole.startswith(prompt) and text.startswith(ended) and is_shown):
            raise _rewritten(turn, len(messages), has_several=len(turns) > 1)
        if len(prompt) < len(ended) and (content or messages[turn].get("tool_calls")):
            spans.append((len(prompt), len(ended)))
            if turn != turns[-1] and isinstance(content, str) and ended.endswith(content.rstrip()):
                _tell_endless(str(tokenizer.chat_template))
    return Text(text=text, spans=tuple(spans), is_chat=True)


@cache
def _tell_endless(template: str) -> None:
    """Warns once per chat template."""
    logger.warning(
        "--data.apply_chat_template: the template puts nothing behind an answer that others follow, so only "
        "the last\nanswer of a conversation learns to stop. Use one that ends every turn "
        "(--data.tokenizer_chat_template),\nor a row for each reply without --data.multiturn."
    )


def _rewritten(turn: int, num_messages: int, *, has_several: bool) -> ValueError:
    message = f"the assistant's message {turn + 1} of {num_messages}"
    if not has_several:
        return ValueError(
            f"--data.apply_chat_template: the template does not show {message} as it stands,\n"
            "right behind the generation prompt, so the loss would fall on another text. Write the message\n"
            "as the template does, or use a template that keeps it (--data.tokenizer_chat_template)."
        )
    return ValueError(
        f"--data.apply_chat_template: the template rewrites {message} (or what it answers)\n"
        "afterwards, so the loss would fall on a text that the policy never wrote. Use one that keeps it\n"
        "(--data.tokenizer_chat_template), or a row for each reply without --data.multiturn."
    )


def scored_answer(
    messages: Sequence[Message], first: int, tokenizer: PreTrainedTokenizerBase, *, is_open: bool = False
) -> Text:
    """Returns the conversation up to the last assistant turn, with everything after the prompt (the messages
    before `first`) marked. The text is only scored, not learned, so a template may render the answer in any
    way. `is_open`: the last turn was truncated and is rendered without an end."""
    turns = _assistant_turns(messages, first)
    prompt = render_messages(messages[:first], tokenizer, add_generation_prompt=True)
    talk = messages[: turns[-1] + 1]
    text = render_messages(talk, tokenizer, add_generation_prompt=False, is_open=is_open).rstrip("\n")
    start = len([*takewhile(bool, map(eq, prompt, text))])  # length of the common prefix
    is_empty = not any(messages[turn].get("content") or messages[turn].get("tool_calls") for turn in turns)
    return Text(text=text, spans=() if is_empty else ((start, len(text)),), is_chat=True)


def _assistant_turns(messages: Sequence[Message], first: int) -> list[int]:
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        place = "the last message is not" if first else "no message is"
        raise BadRow(f"{place} of the assistant: role {messages[-1]['role']!r} has nothing to learn.")
    return turns
