"""A conversation as one stream of tokens: what a chat template writes between the answers of a policy."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
MARK = "\u241fanswer\u241f"
"""Stands where an answer was, to find what is behind it."""


class TemplateProblem(ValueError):
    """The chat template does not take these messages, or nothing of it can stand behind an answer."""


class ChatStream:
    """A tokenizer's chat template. An answer stays as it was sampled: a conversation that goes on has the
    tokens of what the template writes behind it, whatever the template makes of earlier answers."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    def render(self, messages: Sequence[Message], tools: Any = None, *, answering: bool = True) -> str:
        """`answering`: with what the policy answers behind."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [_as_templates_read(message) for message in messages],
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=answering,
                )
            )
        except Exception as error:
            raise TemplateProblem(f"the chat template does not take these messages: {error}") from error

    def behind(self, messages: Sequence[Message], place: int, tools: Any, end: str) -> str:
        """What the template writes behind the answer at `place` in `messages`, but for `end`, what of it was
        sampled: an end-of-turn token, or nothing where the answer was cut off."""
        marked = [*messages[:place], {"role": "assistant", "content": MARK}, *messages[place + 1 :]]
        try:
            text = self.render(marked, tools)
        except TemplateProblem:  # it looks for the calls that tools have answered
            return self._behind_itself(messages, place, tools, end)
        if text.count(MARK) != 1:
            return self._behind_itself(messages, place, tools, end)
        return text.partition(MARK)[2].removeprefix(end)

    def _behind_itself(self, messages: Sequence[Message], place: int, tools: Any, end: str) -> str:
        """As `behind`, where the template needs the real answer."""
        until = self.render(messages[: place + 1], tools, answering=False)
        whole = self.render(messages, tools)
        if not whole.startswith(until):
            raise TemplateProblem(
                f"the chat template writes an answer anew once it is not the last. {departure(until, whole)}"
            )
        closing = end or str(self.tokenizer.eos_token)
        after = until.rfind(closing)
        if after < 0:
            raise TemplateProblem(f"the chat template does not end an answer with {closing!r}")
        return whole[after + len(end) :]


def probe(tokenizer: "PreTrainedTokenizerBase", *, with_tools: bool) -> list[str]:
    """What the chat template would write otherwise than it was sampled, of some answers: a remark for each.
    TemplateProblem where an answer cannot stay as it was sampled."""
    stream, remarks = ChatStream(tokenizer), []
    for what, messages, tools in _conversations(with_tools):
        asked = stream.render(messages[:1], tools)
        behind = stream.behind(messages, 1, tools, "")
        sampled = _as_sampled(stream, messages[:2], tools, asked, _end_of_turn(tokenizer, behind))
        lost = [m["content"] for m in messages[2:] if m["content"] not in behind]
        if lost:
            raise TemplateProblem(f"{what}: the chat template leaves out the message behind it, {lost[0]!r}")
        whole, kept = stream.render(messages, tools), asked + sampled
        if not whole.startswith(kept):
            remarks.append(f"{what}: the chat template changes it. {departure(kept, whole)}")
    return remarks


def _conversations(with_tools: bool) -> Iterator[tuple[str, list[Message], Any]]:
    """What is tried, the messages, the tools. The answer is the second message."""
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
    """The token that ends an answer, of what a template writes behind it."""
    tokens = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len)
    return next((token for token in reversed(tokens) if behind.startswith(token)), str(tokenizer.eos_token))


def _as_sampled(stream: ChatStream, messages: Sequence[Message], tools: Any, asked: str, end: str) -> str:
    """The answer that ends `messages`, as a policy would write it."""
    if not messages[-1].get("tool_calls"):
        return messages[-1]["content"] + end
    written = stream.render(messages, tools, answering=False)
    if not written.startswith(asked):
        raise TemplateProblem(f"the chat template changes what was asked. {departure(asked, written)}")
    return written[len(asked) : written.rfind(end) + len(end)]


def departure(kept: str, written: str) -> str:
    """Where two texts begin to differ, for people."""
    same = next((i for i, (a, b) in enumerate(zip(kept, written, strict=False)) if a != b), len(written))
    start = max(0, same - 20)
    return f"It writes {written[start : same + 40]!r} where the stream has {kept[start : same + 40]!r}."


def _as_templates_read(message: Mapping[str, Any]) -> Message:
    """Arguments of calls as mappings, which OpenAI has as text; a content of text parts as one text."""
    read = dict(message)
    if calls := message.get("tool_calls"):
        read["tool_calls"] = [_with_arguments_read(call) for call in calls]
    content = message.get("content")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        read["content"] = "".join(part["text"] for part in content)
    return read


def _with_arguments_read(call: Mapping[str, Any]) -> dict[str, Any]:
    """What a policy wrote and is no JSON stays text."""
    function = dict(call["function"])
    if isinstance(arguments := function.get("arguments"), str):
        with suppress(ValueError):
            function["arguments"] = json.loads(arguments)
    return {**call, "function": function}
