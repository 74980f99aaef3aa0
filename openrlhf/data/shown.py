"""Checks that a chat template writes all that a conversation has: templates leave out what they do not know,
such as a role, the thoughts of an answer or the second of two calls, without an error."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from openrlhf.data.bad_rows import BadRow
from openrlhf.data.messages import THOUGHTS, Message, join_text, read_calls, reads, render, thought_of
from openrlhf.errors import ErrorCode

REMEDY = "Use a template that writes it (--data.tokenizer_chat_template), or take it out of the row."


def check_shown(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] | None,
    learned: Collection[int] = (),
) -> None:
    """Raises BadRow for a text, another part or a call that the chat template leaves out, and for the
    thoughts of an answer to learn, or if a system message lists the tools that the template lists too.
    `learned`: numbers of the messages to learn, from 0; templates may leave out the thoughts of others."""
    template = str(tokenizer.chat_template)
    for i, what in _left_out(tokenizer, template, tuple(map(_form, messages)), bool(tools)):
        if what != "thoughts" or i in learned:
            place = f"the {what} of message {i + 1} ({messages[i]['role']})"
            raise BadRow(f"the chat template leaves out {place}.\n{REMEDY}", ErrorCode.CHAT_TEMPLATE)
    if tools and reads(tokenizer, template).tools and _lists(messages, tools):
        text = "its system message has the tools, and the chat template would list them again.\n"
        raise BadRow(f"{text}Add --data.tools_key None, or take one of the two out of the row.")


def _lists(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Tells whether the system message has each tool's name as JSON or Python writes it."""
    text = (join_text(messages[0].get("content")) or "") if messages[0]["role"] == "system" else ""
    found = "".join(text.split()).replace("'", '"')
    return all(f'"name":"{tool.get("function", tool).get("name")}"' in found for tool in tools)


class _Form(NamedTuple):
    """The form of a message without its texts: messages of one form are rendered alike."""

    role: str
    parts: tuple[tuple[str, ...], ...] | None
    """Type and keys of each part; None if the content is text."""
    has_text: bool
    thinks: bool
    calls: int


def _form(message: Message) -> _Form:
    content, has_thought = message.get("content"), bool((thought_of(message) or "").strip())
    parts = None
    if isinstance(content, list):
        parts = tuple((str(part.get("type")), *sorted(part.keys() - {"type"})) for part in content)
    has_text = isinstance(content, str) and bool(content.strip())
    return _Form(message["role"], parts, has_text, has_thought, len(read_calls(message)))


@lru_cache(maxsize=4096)
def _left_out(
    tokenizer: PreTrainedTokenizerBase, template: str, talk: tuple[_Form, ...], has_tools: bool
) -> tuple[tuple[int, str], ...]:
    """Renders messages of these forms with a mark for each text. Returns the number of each message of which
    a mark is missing, and what it stands for; nothing if the template refuses the messages."""
    tool = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
    try:
        text = render(
            tokenizer, [_marked(*item) for item in enumerate(talk)], tools=[tool] * has_tools or None
        )
    except Exception:  # by a template for other messages; the row's own are refused where they are rendered
        return ()
    return tuple(
        (i, what)
        for i, form in enumerate(talk)
        for mark, what in _marks(i, form)
        if mark not in text or f"': '{mark}" in text  # as Python writes it
    )


def _marks(i: int, form: _Form) -> Iterator[tuple[str, str]]:
    for j, (kind, *_) in enumerate(form.parts or [("text",)] * form.has_text):
        if kind != "image":  # which has no text; its placeholders are counted
            of_part = "thoughts" if kind in THOUGHTS else f"{kind} part"
            yield f"MARK{i}PART{j}.", "content" if kind == "text" else of_part
    if form.thinks:
        yield f"MARK{i}THOUGHT.", "thoughts"
    for j in range(form.calls):
        yield f"MARK{i}CALL{j}.", "calls"


def _marked(i: int, form: _Form) -> Message:
    text = lambda j: f"MARK{i}PART{j}."
    parts = [
        {"type": kind} | dict.fromkeys(["text"] if kind == "text" else keys, text(j))
        for j, (kind, *keys) in enumerate(form.parts or ())
    ]
    content = text(0) if form.has_text else "" if form.parts is None else parts
    message: Message = {"role": form.role, "content": content}
    if form.thinks:
        message["reasoning_content"] = f"MARK{i}THOUGHT."
    calls = [{"name": "probe", "arguments": {"a": f"MARK{i}CALL{j}."}} for j in range(form.calls)]
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": f"call{j:05}", "function": call} for j, call in enumerate(calls)
        ]
    return message | ({"tool_call_id": "call00000", "name": "probe"} if form.role == "tool" else {})
