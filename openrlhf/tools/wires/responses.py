"""OpenAI's API /v1/responses, without responses that the server stores."""

import logging
from collections.abc import Iterator, Mapping, Sequence

from openrlhf.api import BadRequest, Object, Wire, read_call, read_content, read_tool, refuse, warn_once

logger = logging.getLogger(__name__)

STORED = ("previous_response_id", "conversation", "prompt", "background")
HOSTED = ("web_search", "image_generation")
"""Types of tools that the API itself would run, and that Codex declares whether or not there is one."""
ENCRYPTED = "reasoning.encrypted_content"
"""The one member of `include` that changes nothing in a response without reasoning items."""
ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p")
"""Fields of a request that its response repeats."""
COUNTED = {"input": "prompt", "output": "completion", "total": "total"}
DETAILS = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
STATUSES = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}


def read(request: Object) -> dict:
    refuse(request, ("max_tool_calls", "top_logprobs"))
    refuse(request, STORED, "the server stores nothing; send the conversation as input")
    form = (request.get("text") or {}).get("format", {}).get("type", "text")
    cut = request.get("truncation") or "disabled"
    asked = {f"text.format {form}": form != "text", f"truncation {cut}": cut != "disabled"}
    asked |= {f"include {name}": name != ENCRYPTED for name in request.get("include") or ()}
    refuse(asked, list(asked))
    given = request["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return {
        "messages": _read_items(request.get("instructions"), items),
        "tools": [
            read_tool({**tool, "name": name}, "parameters") for name, (tool, _) in _tools(request).items()
        ],
        "tool_choice": request.get("tool_choice"),
        "max_tokens": request.get("max_output_tokens"),
    } | {name: request.get(name) for name in ("temperature", "top_p")}


def _tools(request: Object) -> dict[str, tuple[Object, dict]]:
    """Maps the names of tools that the policy reads to (tool, fields of its calls)."""
    found = {}
    for tool in request.get("tools") or ():
        if tool.get("type") in HOSTED:
            warn_once(
                logger, f"the policy is not offered the tool {tool['type']}, which the API itself would run"
            )
            continue
        members = tool["tools"] if tool.get("type") == "namespace" else [tool]
        for member in members:
            name = {"name": member.get("name")}
            fields = name if member is tool else name | {"namespace": tool["name"]}
            found[_flat(fields)] = member, fields
    return found


def _flat(call: Mapping) -> str:
    """Returns the name under which the policy reads a tool, that of its namespace in front."""
    return "__".join(filter(None, (call.get("namespace"), call.get("name"))))


def _read_items(instructions: str | None, items: Sequence[Object]) -> list[dict]:
    """Returns the messages. Calls belong to the answer in front of them."""
    messages: list[dict] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": read_content(item["content"])})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = read_call(item["call_id"], _flat(item), item["arguments"])
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            said = read_content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": said})
        else:
            raise BadRequest(f"input: an item of type {kind!r}: not supported")
    return messages


def write(request: Object, answer: dict) -> dict:
    choice, usage = answer["choices"][0], answer["usage"]
    status = STATUSES.get(choice["finish_reason"], "failed")
    failure = {"code": "server_error", "message": "the engine aborted the answer"}
    return {
        "id": f"resp_{answer['id']}",
        "object": "response",
        "created_at": answer["created"],
        "status": status,
        "error": failure if status == "failed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": answer["model"],
        "output": list(_write_items(answer["id"], choice["message"], status, _tools(request))),
        "parallel_tool_calls": True,
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "usage": {f"{name}_tokens": usage[f"{known}_tokens"] for name, known in COUNTED.items()} | DETAILS,
        "prompt_token_ids": answer["prompt_token_ids"],
        "token_ids": choice["token_ids"],
    } | {name: request.get(name) for name in ECHOED}


def _write_items(
    name: str, message: dict, status: str, tools: Mapping[str, tuple[Object, dict]]
) -> Iterator[dict]:
    calls = message.get("tool_calls") or ()
    done = {"status": "completed" if status == "completed" else "incomplete"}
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        yield {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part]} | done
    for call in calls:
        function = call["function"]
        _, fields = tools.get(function["name"], (None, {"name": function["name"]}))
        asked = {"call_id": call["id"], **fields, "arguments": function["arguments"]}
        yield {"type": "function_call", "id": f"fc_{call['id']}"} | asked | done


def events(request: Object, response: dict) -> Iterator[dict]:
    for number, event in enumerate(_events(response)):
        yield event | {"type": f"response.{event['type']}", "sequence_number": number}


def _events(response: dict) -> Iterator[dict]:
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "created", "response": begun}
    yield {"type": "in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        where = {"output_index": index}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield {"type": "output_item.added", "item": item | empty | {"status": "in_progress"}} | where
        for event in _of_message(item) if item["type"] == "message" else _of_call(item):
            yield event | where | {"item_id": item["id"]}
        yield {"type": "output_item.done", "item": item} | where
    yield {"type": response["status"], "response": response}


def _of_message(item: dict) -> Iterator[dict]:
    (part,), where = item["content"], {"content_index": 0}
    yield {"type": "content_part.added", "part": part | {"text": ""}} | where
    yield {"type": "output_text.delta", "delta": part["text"], "logprobs": []} | where
    yield {"type": "output_text.done", "text": part["text"], "logprobs": []} | where
    yield {"type": "content_part.done", "part": part} | where


def _of_call(item: dict) -> Iterator[dict]:
    yield {"type": "function_call_arguments.delta", "delta": item["arguments"]}
    done = {"arguments": item["arguments"], "name": item["name"]}
    yield {"type": "function_call_arguments.done"} | done


RESPONSES = Wire("/v1/responses", read, write, events, counts="/v1/responses/input_tokens")
