"""Conversations and tools as chat templates read them: those of rows and of agents' requests.

A table gives each object the keys of all its rows, with null for those that the row lacks. So that a row has
the same tokens in every format, keys that are null are left out, whatever the format.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
MARK = "\u241fanswer\u241f"
"""Placeholder of a text in a rendered conversation."""


def without_nulls(value: Any) -> Any:
    """Leaves out the keys that are null, in objects at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def decoded(value: Any) -> Any:
    """Returns the list or object whose JSON text the value is, else the value."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def read_text(value: Any) -> Any:
    """Returns the messages whose JSON text the value is, else the value."""
    found = decoded(value)
    return found if isinstance(found, list) and found and all(map(_is_message, found)) else value


def _is_message(value: Any) -> bool:
    has_role = isinstance(value, dict) and isinstance(value.get("role"), str)
    return has_role and not value.keys().isdisjoint(("content", "tool_calls", "function_call"))


def text_of(content: Any) -> str | None:
    """Returns a content that is text, or the joined parts if all are text; None for any other."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return "".join(texts) if len(texts) == len(content) else None


def calls_of(message: Message) -> list[dict[str, Any]]:
    """Returns name and arguments of each call in a message, in OpenAI's present and earlier form, or flat."""
    calls = [*(message.get("tool_calls") or ()), message.get("function_call")]
    return [call.get("function", call) for call in calls if isinstance(call, dict)]


def render(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], *, tools: Any = None, **options: Any
) -> str:
    """Applies the chat template to messages without nulls. In OpenAI's format arguments of calls are JSON
    text and contents may be lists of parts: the template gets what it can read. Raises ValueError for a part
    that it cannot read, and whatever the template raises."""
    reads = _reads(tokenizer, str(tokenizer.chat_template))
    fitted = [_fitted(message, reads) for message in messages]
    return str(tokenizer.apply_chat_template(fitted, tools=tools, tokenize=False, **options))


class _Reads(NamedTuple):
    """Whether a chat template reads lists of parts, objects as arguments and null as a content. Others would
    write the text of a Python list, of a dict and "None"."""

    parts: bool
    objects: bool
    null: bool


@cache
def _reads(tokenizer: "PreTrainedTokenizerBase", template: str) -> _Reads:
    """Tries the template, which nothing else declares. `template`: that of the tokenizer, as a key."""

    def shown(*messages: Message) -> str:
        try:
            fitted = [_fitted(message, found) for message in messages]
            return str(tokenizer.apply_chat_template(fitted, tokenize=False))
        except Exception as refusal:  # also by a template for other messages
            return type(refusal).__name__

    found = _Reads(parts=True, objects=True, null=bool(re.search(r"\bis\s+(not\s+)?none\b", template)))
    asked = {"role": "user", "content": [{"type": "text", "text": MARK}]}
    text = shown(asked)
    found = found._replace(parts=MARK in text and not re.search(r"""['"]text['"]\s*:""", text))
    call = {"id": "probe0000", "type": "function", "function": {"name": "f", "arguments": {"a": MARK}}}
    text = shown(asked, {"role": "assistant", "tool_calls": [call]})
    return found._replace(objects=text != "TypeError" and f"{{'a': {MARK!r}}}" not in text)


def _fitted(message: Message, reads: _Reads) -> Message:
    content = message.get("content")
    if content is None:
        content = None if reads.null else ""
    elif isinstance(content, list) and not reads.parts:
        if others := [part for part in content if text_of([part]) is None]:
            raise ValueError(f"it reads text alone, and a content has the part {str(others[0])[:60]}")
        content = text_of(content)
    as_text = lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    fitted, change = {**message, "content": content}, decoded if reads.objects else as_text
    if calls := message.get("tool_calls"):
        fitted["tool_calls"] = [_with_arguments(call, change) for call in calls]
    if call := message.get("function_call"):
        fitted["function_call"] = _with_arguments(call, change)
    return fitted


def _with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the call with changed arguments, which are its own or those of its `function`."""
    if not isinstance(call, dict):
        return call
    changes = {"function": lambda inner: _with_arguments(inner, change), "arguments": change}
    return {key: changes[key](value) if key in changes else value for key, value in call.items()}
