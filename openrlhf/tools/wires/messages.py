"""Anthropic's API /v1/messages."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf.api import BadRequest, Object, Wire, read_call, read_content, read_tool, refuse

BILLING = "x-anthropic-billing-header"
"""Start of a text that Claude Code puts into its system prompt. It changes with every request, so that none
would continue another."""
NO_THREADS = "thread_unsupported_request"
"""Code of an error after which Anthropic's client sends the whole history itself."""
UNPARSED = "unparsed"
"""Only key of the input of a call whose arguments are no JSON object; its value is their text."""
TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def read(request: Object) -> dict:
    refuse(request, ("mcp_servers", "container", "output_format"))
    refuse(request.get("output_config") or {}, ("format",))
    if request.get("thread"):
        raise BadRequest("thread: the server stores nothing; send the whole conversation", NO_THREADS)
    choice, system = request.get("tool_choice") or {"type": "auto"}, _read("system", request.get("system"))
    tools = [
        (read_tool(tool, "input_schema"), tool.get("defer_loading")) for tool in request.get("tools") or ()
    ]
    deferred = {tool["function"]["name"]: tool for tool, is_deferred in tools if is_deferred}
    return {
        "messages": [*system, *(m for each in request["messages"] for m in _read_message(each, deferred))],
        "tools": [tool for tool, is_deferred in tools if not is_deferred],
        "deferred_tools": list(deferred.values()),
        "tool_choice": TOOL_CHOICES.get(choice["type"]) or f"{choice['type']} {choice.get('name')}",
        "stop": request.get("stop_sequences"),
    } | {name: request.get(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}


def _read(role: str, content: Any) -> Iterator[dict]:
    """Yields a message, unless it is a system prompt without text."""
    if role == "system" and isinstance(content, list):
        content = [block for block in content if not block.get("text", "").startswith(BILLING)]
    if (read := read_content(content)) or role != "system":
        yield {"role": role, "content": read}


def _read_message(message: Object, deferred: Mapping[str, dict]) -> Iterator[dict]:
    """Yields the results of tools as messages, and the rest of the message after them. A reference to a
    deferred tool, by which a search for tools answers, is read as the tool's definition: the prompt keeps its
    beginning."""
    role, content = message["role"], message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    of_type = lambda name: [block for block in blocks if block["type"] == name]
    results, calls = of_type("tool_result"), of_type("tool_use")
    for result in results:
        said = read_content(_with_tools(result.get("content"), deferred))
        yield {"role": "tool", "tool_call_id": result["tool_use_id"], "content": said}
    rest = [block for block in blocks if block["type"] not in ("tool_result", "tool_use")]
    if calls:
        asked = [read_call(call["id"], call["name"], _read_input(call["input"])) for call in calls]
        yield {"role": role, "content": read_content(rest), "tool_calls": asked}
    elif rest or not results:
        yield from _read(role, rest)


def _with_tools(content: Any, deferred: Mapping[str, dict]) -> Any:
    if not isinstance(content, list):
        return content
    names = [block.get("tool_name") if block["type"] == "tool_reference" else None for block in content]
    if unknown := [name for name in names if name and name not in deferred]:
        raise BadRequest(f"tool_reference {unknown[0]}: tools has no such tool with defer_loading")
    written = [json.dumps(deferred[name], ensure_ascii=False) + "\n" if name else "" for name in names]
    return [{"type": "text", "text": t} if t else b for t, b in zip(written, content, strict=True)]


def _read_input(given: Any) -> str:
    return given[UNPARSED] if given.keys() == {UNPARSED} else json.dumps(given, ensure_ascii=False)


def write(request: Object, answer: dict) -> dict:
    choice, usage = answer["choices"][0], answer["usage"]
    text, calls = choice["message"]["content"], choice["message"].get("tool_calls") or ()
    reason, ended_by = STOP_REASONS.get(choice["finish_reason"], choice["finish_reason"]), None
    if reason == "end_turn" and (ended_by := choice["stop_reason"]) is not None:
        reason = "stop_sequence"
    return {
        "id": f"msg_{answer['id']}",
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": [{"type": "text", "text": text}] * bool(text) + [_write_call(call) for call in calls],
        "stop_reason": reason,
        "stop_sequence": ended_by,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
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
    usage, ending = response["usage"], ("stop_reason", "stop_sequence")
    begun = dict.fromkeys(ending) | {"content": [], "usage": usage | {"output_tokens": 0}}
    yield {"type": "message_start", "message": response | begun}
    for index, block in enumerate(response["content"]):
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            written = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": written}
        yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": {name: response[name] for name in ending}, "usage": usage}
    yield {"type": "message_stop"}


def error(status: int, message: str, code: str) -> dict:
    if code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words for which harnesses compact their history
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": code, "unsupported": ["thread"]}} if code == NO_THREADS else {}
    return {"type": "error", "error": {"type": kind, "message": message} | details}


MESSAGES = Wire("/v1/messages", read, write, events, error, counts="/v1/messages/count_tokens")
