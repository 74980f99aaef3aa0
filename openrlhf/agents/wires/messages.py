"""Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

import json
from collections.abc import Iterator
from typing import Any

from openrlhf.agents.wires.base import (
    BadRequest,
    Object,
    Wire,
    image_part,
    read_call,
    read_content,
    read_tool,
    refuse,
    text_part,
)

NOT_OFFERED = ("mcp_servers", "container", "output_format")
BILLING = "x-anthropic-billing-header"
"""Start of a text that Claude Code puts into its system prompt. It changes with every request, so that none
would continue another."""
TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
NO_THREADS = "thread_unsupported_request"
"""Code of an error after which Anthropic's client sends the whole history itself."""
UNPARSED = "unparsed"
"""Only key of the input of a call whose arguments are no JSON object; its value is their text."""


def read(request: Object) -> dict:
    refuse(request, NOT_OFFERED)
    refuse(request.get("output_config") or {}, ("format",))
    if request.get("thread"):
        raise BadRequest("thread: the server stores nothing; send the whole conversation", NO_THREADS)
    system = _with_role("system", request.get("system") or "")
    settings = ("max_tokens", "temperature", "top_p", "top_k")
    return {
        "messages": [*system, *(m for each in request["messages"] for m in _read_message(each))],
        "tools": [_read_tool(tool) for tool in request.get("tools") or ()],
        "tool_choice": _read_choice(request.get("tool_choice") or {"type": "auto"}),
        "stop": request.get("stop_sequences"),
    } | {name: request.get(name) for name in settings}


def _with_role(role: str, content: Any) -> Iterator[dict]:
    """Yields a message, unless it is a system prompt without text."""
    if role == "system" and not isinstance(content, str):
        content = [block for block in content if not block.get("text", "").startswith(BILLING)]
    if (read := read_content(content, _part)) or role != "system":
        yield {"role": role, "content": read}


def _read_message(message: Object) -> Iterator[dict]:
    """Yields the results of tools as messages, and the rest of the message after them."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        yield from _with_role(role, content)
        return
    results = [block for block in content if block["type"] == "tool_result"]
    calls = [block for block in content if block["type"] == "tool_use"]
    rest = [block for block in content if block["type"] not in ("tool_result", "tool_use")]
    for result in results:
        read = read_content(result.get("content"), _part)
        yield {"role": "tool", "tool_call_id": result["tool_use_id"], "content": read}
    if calls:
        content = read_content(rest, _part)
        yield {"role": role, "content": content, "tool_calls": [_read_call(call) for call in calls]}
    elif rest or not results:
        yield from _with_role(role, rest)


def _part(block: Object) -> dict:
    match block:
        case {"type": "text", "text": str(text)}:
            return text_part(text)
        case {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}:
            return image_part(f"data:{kind};base64,{data}")
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return image_part(url)
    raise BadRequest(f"a block of type {block.get('type')!r}: not supported, nor are other forms of images")


def _read_call(block: Object) -> dict:
    match block["input"]:
        case {"unparsed": str(text), **rest} if not rest:
            return read_call(block["id"], block["name"], text)
    return read_call(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))


def _read_tool(tool: Object) -> dict:
    if "input_schema" not in tool:
        text = "this tool's schema is known to Anthropic's models alone; offer it with an input_schema"
        raise BadRequest(f"tools: {tool.get('type')}: {text}")
    return read_tool(tool["name"], tool.get("description"), tool["input_schema"])


def _read_choice(choice: Object) -> str:
    return TOOL_CHOICES.get(choice["type"]) or f"{choice['type']} {choice.get('name')}"


def write(request: Object, answer: dict) -> dict:
    choice, usage = answer["choices"][0], answer["usage"]
    message, ended_by = choice["message"], choice["stop_reason"]
    content = [text_part(text)] if (text := message["content"]) else []
    content += [_write_call(call) for call in message.get("tool_calls") or ()]
    reason = STOP_REASONS.get(choice["finish_reason"], choice["finish_reason"])
    by_sequence = reason == "end_turn" and ended_by is not None
    return {
        "id": f"msg_{answer['id']}",
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": content,
        "stop_reason": "stop_sequence" if by_sequence else reason,
        "stop_sequence": ended_by if by_sequence else None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        },
        "prompt_token_ids": answer["prompt_token_ids"],
        "token_ids": choice["token_ids"],
    }


def _write_call(call: Object) -> dict:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = None
    given = arguments if isinstance(arguments, dict) else {UNPARSED: function["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def events(request: Object, response: dict) -> Iterator[dict]:
    usage = response["usage"]
    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield {"type": "message_start", "message": response | begun}
    for index, block in enumerate(response["content"]):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            written = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": written}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {name: response[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ending, "usage": usage}
    yield {"type": "message_stop"}


ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def error(status: int, message: str, code: str) -> dict:
    if code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words for which harnesses compact their history
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": code, "unsupported": ["thread"]}} if code == NO_THREADS else {}
    return {"type": "error", "error": {"type": kind, "message": message} | details}


MESSAGES = Wire(read, write, events, lambda count: {"input_tokens": count}, error)
