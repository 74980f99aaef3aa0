"""What the server knows of an API, and what the translations share."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.data.messages import join_text

Object = Mapping[str, Any]


class BadRequest(Exception):
    """Raised for a request that cannot be served; the client receives status 400."""

    def __init__(self, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Wire:
    """One API, as a translation to and from chat completions."""

    read: Callable[[Object], dict]
    """Translates a request. Raises BadRequest for what the policy cannot honour."""
    write: Callable[[Object, dict], dict]
    """Translates (request, answer of chat completions) to the response."""
    events: Callable[[Object, dict], Iterator[dict]]
    """Yields (request, response) as the events of a stream. Engines return answers as a whole, so each part
    is one event."""
    count: Callable[[int], dict]
    """Translates the number of tokens that the policy would read."""
    error: Callable[[int, str, str], dict]
    """Translates (HTTP status, message, code)."""
    last_event: str = ""
    """Data that ends a stream."""


def as_event(data: Object) -> bytes:
    """Returns a server-sent event, which has the name of its `type`, if it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


def openai_error(status: int, message: str, code: str) -> dict:
    return {"error": {"message": message, "type": code, "code": code, "param": None}}


def refuse(request: Object, names: Sequence[str]) -> None:
    """Raises BadRequest for fields that are set, but not supported."""
    if others := [name for name in names if request.get(name)]:
        raise BadRequest(f"{', '.join(others)}: not supported")


def read_content(value: Any, part: Callable[[Object], dict]) -> Any:
    """Returns a content in the form of chat completions: text, or a list of parts if not all are text.
    `part`: translates one part."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = [part(each) for each in value]
    text = join_text(parts)
    return parts if text is None else text


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def image_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def read_call(call_id: str, name: str, arguments: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_tool(name: str, description: str | None, parameters: Any) -> dict:
    known = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in known.items() if v is not None}}
