"""Conversations and tools as chat templates read them: those of rows and of agents' requests. Keys that are
null are left out, because a table gives each object the keys of all its rows, with null for the others."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from openrlhf.text import Calendar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
MARK = "\u241fanswer\u241f"
"""Placeholder of a text in a rendered conversation."""
CALLERS = ("function_call", "tool_call")
SENDERS = {"human": "user", **dict.fromkeys(("gpt", "model", "bot", "chatbot", "ai", *CALLERS), "assistant")}
SENDERS |= {"observation": "tool", "tool_response": "tool"}
SENDERS |= {role: role for role in ("system", "user", "assistant", "tool")}
"""Roles by the names of ShareGPT and of ms-swift; calls are the content of `CALLERS`."""
ROLES = {*SENDERS.values(), "developer", "ipython", "observation"}
"""Roles of templates. A message with another one is written as it is, and never an answer."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of the thoughts before an answer. A template gets them under the names that it has."""
WEIGHTS = ("weight", "loss", "train", "training", "trainable", "loss_mask", "step_loss_mask")
WEIGHTS += ("loss_weight", "loss_scale")
"""Names of the mark, true or 1, false or 0, whether an answer is learned."""
MASKS = ("masked", "train_detail", "training_detail")
"""Names of other marks, which are refused: an opposite, and marks of parts of an answer."""


def with_role(message: Any) -> Any:
    """Returns a message of ShareGPT, {"from": "human", "value": ...}, with role and content, also if it has
    one of the two keys alone, and roles by the names that templates know, in any case; else itself. GLM-4's
    template has a role observation."""
    if not isinstance(message, dict):
        return message
    key = "role" if message.get("role") else "from"
    sender = message[key].lower() if isinstance(message.get(key), str) else ""
    if sender not in SENDERS or (key == "role" and sender == "observation"):
        return message
    said = {"role": SENDERS[sender], "from": None}
    if message.get("content") is None and "value" in message:
        said |= {"content": message.get("value"), "value": None}
    if sender in CALLERS:
        said |= {"content": "", "tool_calls": (message | said).get("content")}
    return message | said


def as_openai(message: Message) -> Message:
    """Returns the message with its calls, and the results of calls, in OpenAI's present form: earlier and
    flat forms are `function_call` and the role function, and {"name": ..., "arguments": ...}. A refusal is
    the text of an answer."""
    content = message.get("content")
    if isinstance(content, list):
        refused = lambda part: isinstance(part, dict) and part.get("type") == "refusal"
        content = [{"type": "text", "text": p.get("refusal")} if refused(p) else p for p in content]
    elif content is None and message.get("refusal"):
        content = message["refusal"]
    message = message | {"content": content}
    role = "tool" if message["role"] == "function" else message["role"]
    several = decoded(message.get("tool_calls")) or ()
    calls = [*(several if isinstance(several, list | tuple) else [several]), message.get("function_call")]
    found = {"tool_calls": [as_function(call) for call in calls if call]} if any(calls) else {}
    return message | {"role": role, "function_call": None} | found


def as_function(flat: Any) -> Any:
    """Returns a tool or a call without `function`, {"name": ...}, in OpenAI's form, also a tool of Anthropic
    or MCP; else itself."""
    if not isinstance(flat, dict) or "function" in flat or "name" not in flat:
        return flat
    outer = {key: flat[key] for key in ("id", "type") if flat.get(key)}
    schemas = dict.fromkeys(("input_schema", "inputSchema"), "parameters")
    inner = {schemas.get(key, key): value for key, value in flat.items() if key not in outer}
    return {"type": "function", **outer, "function": inner}


def thought_of(message: Message) -> str | None:
    """Returns the thoughts before an answer that a message has apart from its content."""
    return next((message[name] for name in THOUGHTS if isinstance(message.get(name), str)), None)


def thoughts_apart(message: Message, tokenizer: "PreTrainedTokenizerBase") -> Message:
    """Returns an answer that begins with <think>...</think> with these thoughts apart from its content, if
    the chat template writes such. It may end a prompt with <think>, which would be missing or there twice."""
    content = message.get("content") if message["role"] == "assistant" else None
    found = _THOUGHTS.fullmatch(content) if isinstance(content, str) else None
    if not found or thought_of(message) or not reads(tokenizer, str(tokenizer.chat_template)).apart:
        return message
    return message | {"reasoning_content": found[1].strip("\n"), "content": found[2]}


_THOUGHTS = re.compile(r"\s*(?:<think>)?((?:(?!</?think>).)*)</think>\s*(.*)", re.DOTALL)


def is_learned(message: Message) -> bool:
    """Tells whether an answer is learned: unless it has a weight of 0. Rows of Parquet have null for none."""
    return all(message.get(name) in (None, 1) for name in WEIGHTS)


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


def from_column(value: Any) -> Any:
    """Returns the list or object whose text the value is, as JSON or as Python's `repr`, which pandas writes
    into CSV; else the value."""
    found = decoded(value)
    if isinstance(found, str) and found.lstrip().startswith(("[{'", "{'")):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(found.strip())
    return found


def read_text(value: Any) -> Any:
    """Returns the messages whose text the value is, see `from_column`; else the value."""
    found, contents = from_column(value), {"content", "tool_calls", "function_call"}
    is_message = lambda part: isinstance(part, dict) and "role" in part and contents & part.keys()
    is_talk = isinstance(found, list) and found and all(is_message(with_role(part)) for part in found)
    return found if is_talk else value


def join_text(content: Any) -> str | None:
    """Returns a content that is text, or the joined parts if all are text; None for any other."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return "".join(texts) if len(texts) == len(content) else None


def is_blank(message: Message) -> bool:
    """Tells whether a message has no call, no picture, no thoughts and no text but white space."""
    text = join_text(message.get("content") or "")
    return text is not None and not (text + (thought_of(message) or "")).strip() and not read_calls(message)


def read_calls(message: Message) -> list[dict[str, Any]]:
    """Returns name and arguments of each call in a message, in OpenAI's present and earlier form, or flat."""
    calls = [*(message.get("tool_calls") or ()), message.get("function_call")]
    return [call.get("function", call) for call in calls if isinstance(call, dict)]


def render(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], *, tools: Any = None, **options: Any
) -> str:
    """Applies the chat template to messages without nulls, with arguments of calls and parts of contents in a
    form that it reads. Raises ValueError for a part that it cannot read, and whatever it raises."""
    form = reads(tokenizer, str(tokenizer.chat_template))
    fitted = [_fitted(message, form) for message in messages]
    options |= {"tools": tools, "tokenize": False, "strftime_now": Calendar.today.strftime}
    return str(tokenizer.apply_chat_template(fitted, **options))


class Reads(NamedTuple):
    """Whether a chat template reads tools, texts and parts as contents, objects as arguments of calls and as
    results of tools, null as a content, and thoughts apart from a content; and the names of thoughts."""

    tools: bool
    texts: bool
    parts: bool
    objects: bool
    mappings: bool
    null: bool
    apart: bool
    thoughts: tuple[str, ...]


@cache
def reads(tokenizer: "PreTrainedTokenizerBase", template: str) -> Reads:
    """Tries the tokenizer's template, because nothing declares what it reads."""

    def shown(*messages: Message, **options: Any) -> str:
        try:
            fitted = [_fitted(message, found) for message in messages]
            return str(tokenizer.apply_chat_template(fitted, tokenize=False, **options))
        except Exception:  # by a template for other messages
            return ""

    found = Reads(*7 * (True,), thoughts=tuple(name for name in THOUGHTS if name in template))
    asked = {"role": "user", "content": [{"type": "text", "text": "probe"}]}
    text = shown(asked)
    found = found._replace(parts="probe" in text and not re.search(r"""['"]text['"]\s*:""", text))
    found = found._replace(texts=not found.parts or "probe" in shown(asked | {"content": "probe"}))
    call = {"name": "f", "arguments": {"a": "probe" * 2}}
    calls = [call | {"id": "call00000", "type": "function", "function": call}]
    found = found._replace(tools=shown(asked) != shown(asked, tools=calls))
    is_written = lambda probe, *talk: probe in (text := shown(asked, *talk)) and "{'a'" not in text
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    if not is_written("probe" * 2, called):
        found = found._replace(objects=False)
        found = found._replace(objects=not is_written("probe" * 2, called))
    result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": {"a": "probe" * 3}}
    thinking = shown(asked, {"role": "assistant", "content": "probe.", THOUGHTS[0]: "probe:"})
    has_null, has_text = (shown(asked, called | {"content": content}) for content in (None, ""))
    return found._replace(
        mappings=is_written("probe" * 3, called, result),
        apart="probe:" in thinking and "probe." in thinking,
        null=bool(_NONE.search(template) and has_null) and has_null.count("None") == has_text.count("None"),
    )


_NONE = re.compile(r"\bis\s+(not\s+)?none\b")


def _fitted(message: Message, form: Reads) -> Message:
    content = message.get("content")
    if content is None:
        content = None if form.null else ""
    elif isinstance(content, list) and not form.parts:
        if others := [part for part in content if join_text([part]) is None]:
            raise ValueError(f"it reads text alone, and a content has the part {str(others[0])[:60]}")
        content = join_text(content)
    elif isinstance(content, list) and message["role"] == "tool":  # GLM-4.5's writes parts as Python does
        content = content if (text := join_text(content)) is None else text
    elif isinstance(content, dict) and not form.mappings:
        raise ValueError(f"it reads text, and the result of a tool is an object, {str(content)[:60]}")
    if isinstance(content, str) and not form.texts:
        content = [{"type": "text", "text": content}]
    as_text = lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    thought = thought_of(message)
    fitted = {**message, "content": content} | (dict.fromkeys(form.thoughts, thought) if thought else {})
    change = decoded if form.objects else as_text
    if calls := message.get("tool_calls"):
        fitted["tool_calls"] = [_with_arguments(call, change) for call in calls]
    if call := message.get("function_call"):
        fitted["function_call"] = _with_arguments(call, change)
    return fitted


def _with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the call with changed arguments, which are its own or those of its `function`. Without any,
    also if their text is empty, they are {}."""
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return call | {"function": _with_arguments(call["function"], change)}
    return call | {"arguments": change(call.get("arguments") or {})} if "name" in call else call
