"""OpenAI's API /v1/responses, without responses that the server stores."""

from collections.abc import Iterator
from typing import Any

from openrlhf.agents.wires.base import (
    BadRequest,
    Object,
    Wire,
    image_part,
    openai_error,
    read_call,
    read_content,
    read_tool,
    refuse,
    text_part,
)

STORED = ("previous_response_id", "conversation", "prompt", "background")
NOT_OFFERED = ("max_tool_calls", "top_logprobs")
ENCRYPTED = "reasoning.encrypted_content"
"""The one member of `include` that leaves a response without reasoning items as it is."""
STATUSES = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}


def read(request: Object) -> dict:
    refuse(request, NOT_OFFERED)
    if stored := [name for name in STORED if request.get(name)]:
        raise BadRequest(f"{', '.join(stored)}: the server stores nothing; send the conversation as input")
    if (form := (request.get("text") or {}).get("format", {}).get("type", "text")) != "text":
        raise BadRequest(f"text.format: {form}: not supported")
    if (cut := request.get("truncation") or "disabled") != "disabled":
        raise BadRequest(f"truncation: {cut}: not supported; send a shorter input")
    if others := [name for name in request.get("include") or () if name != ENCRYPTED]:
        raise BadRequest(f"include: {', '.join(others)}: not supported")
    given = request["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return {
        "messages": _read_items(request.get("instructions"), items),
        "tools": [_read_tool(tool) for tool in request.get("tools") or ()],
        "tool_choice": request.get("tool_choice"),
        "max_tokens": request.get("max_output_tokens"),
    } | {name: request.get(name) for name in ("temperature", "top_p")}


def _read_items(instructions: str | None, items: list[Object]) -> list[dict]:
    """Returns the messages. Calls belong to the answer in front of them."""
    messages: list[dict] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": read_content(item["content"], _part)})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = read_call(item["call_id"], item["name"], item["arguments"])
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = read_content(item["output"], _part)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        else:
            raise BadRequest(f"input: an item of type {kind!r}: not supported")
    return messages


def _part(part: Object) -> dict:
    match part:
        case {"type": "input_text" | "output_text", "text": str(text)}:
            return text_part(text)
        case {"type": "input_image", "image_url": str(url)}:
            return image_part(url)
    raise BadRequest(f"a part of type {part.get('type')!r}: not supported, nor are files as images")


def _read_tool(tool: Object) -> dict:
    if tool["type"] != "function":
        raise BadRequest(f"tools: {tool['type']}: not supported; offer it as a function")
    return read_tool(tool["name"], tool.get("description"), tool.get("parameters"))


def write(request: Object, answer: dict) -> dict:
    choice, usage = answer["choices"][0], answer["usage"]
    status = STATUSES.get(choice["finish_reason"], "failed")
    failure = {"code": "server_error", "message": "the engine aborted the answer"}
    echoed = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p")
    return {
        "id": f"resp_{answer['id']}",
        "object": "response",
        "created_at": answer["created"],
        "status": status,
        "error": failure if status == "failed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": answer["model"],
        "output": list(_write_items(answer["id"], choice["message"], status)),
        "parallel_tool_calls": True,
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        "prompt_token_ids": answer["prompt_token_ids"],
        "token_ids": choice["token_ids"],
    } | {name: request.get(name) for name in echoed}


def _write_items(name: str, message: dict, status: str) -> Iterator[dict]:
    calls, done = message.get("tool_calls") or (), "completed" if status == "completed" else "incomplete"
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{name}", "role": "assistant"}
        yield item | {"status": done, "content": [part]}
    for call in calls:
        known = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": done}
        yield known | {key: call["function"][key] for key in ("name", "arguments")}


def events(request: Object, response: dict) -> Iterator[dict]:
    for number, event in enumerate(_events(response)):
        yield event | {"sequence_number": number}


def _events(response: dict) -> Iterator[dict]:
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        where = {"output_index": index}
        of_item = _of_message if item["type"] == "message" else _of_call
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        item_begun = item | empty | {"status": "in_progress"}
        yield {"type": "response.output_item.added", "item": item_begun} | where
        for event in of_item(item):
            yield event | where | {"item_id": item["id"]}
        yield {"type": "response.output_item.done", "item": item} | where
    yield {"type": f"response.{response['status']}", "response": response}


def _of_message(item: dict) -> Iterator[dict]:
    (part,), where = item["content"], {"content_index": 0}
    yield {"type": "response.content_part.added", "part": part | {"text": ""}} | where
    logs: dict[str, Any] = where | {"logprobs": []}
    yield {"type": "response.output_text.delta", "delta": part["text"]} | logs
    yield {"type": "response.output_text.done", "text": part["text"]} | logs
    yield {"type": "response.content_part.done", "part": part} | where


def _of_call(item: dict) -> Iterator[dict]:
    written = {"arguments": item["arguments"], "name": item["name"]}
    yield {"type": "response.function_call_arguments.delta", "delta": item["arguments"]}
    yield {"type": "response.function_call_arguments.done"} | written


def _count(count: int) -> dict:
    return {"object": "response.input_tokens", "input_tokens": count}


RESPONSES = Wire(read, write, events, _count, openai_error)
