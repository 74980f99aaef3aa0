"""The record of an API that the server answers, and the functions that its translations share."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.data.messages import join_text

Object = Mapping[str, Any]


TEXT_ALONE = "only text reaches the policy; leave it out"


class BadRequest(Exception):
    """Raised for a request that cannot be served; the client receives status 400."""

    def __init__(self, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.code = code


def openai_error(status: int, message: str, code: str) -> dict:
    return {"error": {"message": message, "type": code, "code": code, "param": None}}


@dataclass(frozen=True, slots=True)
class Wire:
    """One API, as a translation to and from chat completions. Packages attach theirs to the agents' server by
    entry points of the group `openrlhf.attached.wire`."""

    path: str
    """Where requests are posted, such as /v1/messages."""
    read: Callable[[Object], dict]
    """Translates a request. Raises BadRequest for what the policy cannot honour."""
    write: Callable[[Object, dict], dict]
    """Translates (request, answer of chat completions) to the response."""
    events: Callable[[Object, dict], Iterator[dict]]
    """Yields (request, response) as a stream. Engines return answers as a whole: each part is one event."""
    error: Callable[[int, str, str], dict] = openai_error
    """Translates (HTTP status, message, code)."""
    last_event: str = ""
    counts: str | None = None
    """Where the tokens of a request are counted, if they are."""


def as_event(data: Object) -> bytes:
    """Returns a server-sent event, which has the name of its `type`, if it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


def refuse(request: Object, names: Sequence[str], why: str = "not supported") -> None:
    """Raises BadRequest for fields that are set, but not supported."""
    if others := [name for name in names if request.get(name)]:
        raise BadRequest(f"{', '.join(others)}: {why}")


def read_content(value: Any) -> Any:
    """Returns the text of a content. Raises BadRequest for other media, which do not reach the policy."""
    if value is None or isinstance(value, str):
        return value or ""
    return join_text([_read_part(part) for part in value]) or ""


def _read_part(part: Object) -> dict:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case _:
            raise BadRequest(f"content of type {part.get('type')}: {TEXT_ALONE}")


def read_call(call_id: str, name: str, arguments: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_tool(tool: Object, schema: str) -> dict:
    """Returns a tool whose parameters have the key `schema`. Raises BadRequest for one that the API's own
    models know."""
    if schema not in tool:
        raise BadRequest(f"tools: {tool.get('type')}: not supported; offer it as a function with {schema}")
    known = {"name": tool["name"], "description": tool.get("description"), "parameters": tool[schema]}
    return {"type": "function", "function": {k: v for k, v in known.items() if v is not None}}
