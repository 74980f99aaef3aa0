"""Conversations as token streams: the text that a chat template writes between a policy's answers."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from openrlhf.data.messages import MARK, Message, render, without_nulls
from openrlhf.errors import warn_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

IN_TURNS = (
    "the chat template takes no system message after the first, or no two messages of the user in a row; "
    "later system messages become the user's, and adjacent ones are joined"
)


class TemplateProblem(ValueError):
    """Raised when the chat template rejects messages, or its text cannot be appended to a sampled answer."""


class ChatStream:
    """Renders conversations with a tokenizer's chat template and keeps answers as sampled: a continued
    conversation appends the template's text after the answer, even if the template would rewrite earlier
    answers."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    def render(self, messages: Sequence[Message], tools: Any = None, *, answering: bool = True) -> str:
        """Returns the rendered conversation; `answering` adds the generation prompt. A template that rejects
        it gets it in turns. Raises TemplateProblem if the template rejects those too."""
        read = [without_nulls(message) for message in messages]
        write = lambda said: render(self.tokenizer, said, tools=tools, add_generation_prompt=answering)
        try:
            return write(read)
        except Exception as error:
            if (turns := in_turns(read)) != read:
                with suppress(Exception):
                    text = write(turns)
                    warn_once(logger, IN_TURNS)
                    return text
            raise TemplateProblem(f"the chat template rejects these messages: {error}") from error

    def behind(self, messages: Sequence[Message], place: int, tools: Any, end: str) -> str:
        """Returns the text that the template writes after the answer at `place` in `messages`, without
        `end`, the part of it that was sampled: an end-of-turn token, or "" for a truncated answer."""
        marked = [*messages[:place], {"role": "assistant", "content": MARK}, *messages[place + 1 :]]
        try:
            text = self.render(marked, tools)
        except TemplateProblem:  # the template needs the calls that the tool results belong to
            return self._behind_itself(messages, place, tools, end)
        if text.count(MARK) != 1:
            return self._behind_itself(messages, place, tools, end)
        return text.partition(MARK)[2].removeprefix(end)

    def _behind_itself(self, messages: Sequence[Message], place: int, tools: Any, end: str) -> str:
        """Does the same as `behind` for a template that needs the real answer."""
        until = self.render(messages[: place + 1], tools, answering=False)
        whole = self.render(messages, tools)
        if not whole.startswith(until):
            raise TemplateProblem(
                f"the chat template rewrites an answer that other messages follow. {departure(until, whole)}"
            )
        closing = end or self.tokenizer.eos_token or ""
        after = until.rfind(closing)
        if after < 0:
            raise TemplateProblem(f"the chat template does not end an answer with {closing!r}")
        return whole[after + len(end) :]


def in_turns(messages: Sequence[Message]) -> list[Message]:
    """Returns the conversation with one system message at most, the first: later ones are the user's, and
    adjacent messages of the system or the user are one."""
    found: list[Message] = []
    for message in messages:
        is_late = message.get("role") == "system" and any(m.get("role") != "system" for m in found)
        message = message | {"role": "user"} if is_late else message
        if found and message.get("role") == found[-1].get("role") in ("system", "user"):
            found[-1] = found[-1] | {"content": _joined(found[-1].get("content"), message.get("content"))}
        else:
            found.append(message)
    return found


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = lambda content: (
        content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    )
    return [*parts(first), *parts("\n\n"), *parts(second)]


def probe(tokenizer: "PreTrainedTokenizerBase", *, with_tools: bool) -> list[str]:
    """Returns a remark for each probe answer that the chat template would render differently than it was
    sampled. Raises TemplateProblem if an answer cannot be kept as sampled."""
    stream, remarks = ChatStream(tokenizer), []
    for what, messages, tools in _conversations(with_tools):
        asked = stream.render(messages[:1], tools)
        behind = stream.behind(messages, 1, tools, "")
        sampled = _as_sampled(stream, messages[:2], tools, asked, _end_of_turn(tokenizer, behind))
        lost = [m["content"] for m in messages[2:] if m["content"] not in behind]
        if lost:
            raise TemplateProblem(f"the chat template omits the message {lost[0]!r} after {what}")
        whole, kept = stream.render(messages, tools), asked + sampled
        if not whole.startswith(kept):
            remarks.append(f"the chat template changes {what}. {departure(kept, whole)}")
    return remarks


def _conversations(with_tools: bool) -> Iterator[tuple[str, list[Message], Any]]:
    """Yields the probe conversations as (description, messages, tools). The second message is the answer."""
    asked, again = {"role": "user", "content": "How many?"}, {"role": "user", "content": "Are you sure?"}
    for what, content in ANSWERS.items():
        yield what, [asked, {"role": "assistant", "content": content}, again], None
    if not with_tools:
        return
    for what, count in {"a call of a tool": 1, "two calls of a tool": 2}.items():
        calls = [{"id": f"probe000{i}", "type": "function", "function": CALL} for i in range(count)]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": "count", "content": f"result {i}"}
            for i, call in enumerate(calls)
        ]
        yield what, [asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results], [TOOL]


ANSWERS = {
    "an answer": "Three.",
    "an empty answer": "",
    "an answer with a thought": "<think>\nI count.\n</think>\n\nThree.",
}
CALL = {"name": "count", "arguments": '{"what": "apples"}'}
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}


def _end_of_turn(tokenizer: "PreTrainedTokenizerBase", behind: str) -> str:
    """Returns the end-of-turn token at the start of `behind`, the template's text after an answer; else the
    tokenizer's EOS token."""
    tokens = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len)
    return next((token for token in reversed(tokens) if behind.startswith(token)), tokenizer.eos_token or "")


def _as_sampled(stream: ChatStream, messages: Sequence[Message], tools: Any, asked: str, end: str) -> str:
    """Returns the text that a policy would sample for the last message."""
    if not messages[-1].get("tool_calls"):
        return messages[-1]["content"] + end
    written = stream.render(messages, tools, answering=False)
    if not written.startswith(asked):
        raise TemplateProblem(f"the chat template changes the question. {departure(asked, written)}")
    return written[len(asked) : written.rfind(end) + len(end)]


def departure(kept: str, written: str) -> str:
    """Describes the first difference between two texts."""
    same = next((i for i, (a, b) in enumerate(zip(kept, written, strict=False)) if a != b), len(written))
    start = max(0, same - 20)
    return f"It writes {written[start : same + 40]!r} instead of {kept[start : same + 40]!r}."
