"""Agents that call tools: Python functions and the tools of MCP servers (openrlhf.agents.mcp).

An agent with one tool, the function `add`:

    class AgentExecutor(ToolAgentExecutor):
        def __init__(self):
            super().__init__([add])

        async def reward(self, prompt, label, messages):
            return float(messages[-1]["content"] == str(label))
"""

import asyncio
import inspect
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

from pydantic import TypeAdapter, ValidationError

from openrlhf.agents.base import called, within
from openrlhf.agents.chat_stream import TOOL, ChatStream, Message, probe
from openrlhf.agents.openai import BadRequest, Session, SessionExecutor
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.text import behind_thoughts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class ToolError(Exception):
    """Raised for a call that is the policy's mistake. The policy reads the message and continues. Any other
    exception is a failure of the tool: the episode fails."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: dict[str, Any]
    """Schema in OpenAI's format: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""
    call: Callable[[str], Awaitable[Any]]
    """Maps arguments (the text of a JSON object) to the result. Raises ToolError for arguments that are no
    JSON object or do not fit the tool."""


class ToolServer(Protocol):
    """A source of tools that is opened for each episode."""

    def tools(self) -> AbstractAsyncContextManager[Sequence[Tool]]: ...


def function_tool(function: Callable) -> Tool:
    """Builds a tool from a function with type hints and a Google-style docstring, as transformers parses
    them. A function that is not `async` runs in a thread."""
    from transformers.utils import get_json_schema  # takes seconds, and checks of agents need none

    description = get_json_schema(function)
    signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    types = {name: TypeAdapter(hints[name]) for name in signature.parameters}

    async def call(text: str) -> Any:
        given = json_object(text)
        try:
            signature.bind(**given)
        except TypeError as error:  # too many or too few arguments
            raise ToolError(str(error)) from error
        hints_of = {name: types.get(name, [*types.values()][-1]) for name in given}  # the last: of **others
        arguments = {name: _read(hints_of[name], name, value) for name, value in given.items()}
        return await called(partial(function, **arguments))

    return Tool(description["function"]["name"], description, call)


def json_object(text: str) -> dict[str, Any]:
    """Parses the arguments of a call. Raises ToolError if they are no JSON object."""
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise ToolError(f"the arguments are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ToolError("the arguments are no JSON object")
    return arguments


def _read(hint: TypeAdapter, name: str, value: Any) -> Any:
    """Converts an argument to the type of its hint: pydantic reads "3" as the integer 3, and a list as a
    tuple. Raises ToolError if it does not fit."""
    try:
        return hint.validate_python(value)
    except ValidationError as error:
        places = ((".".join(map(str, (name, *found["loc"]))), found["msg"]) for found in error.errors())
        raise ToolError("; ".join(f"{place}: {problem}" for place, problem in places)) from error


class ToolAgentExecutor(SessionExecutor, ABC):
    """Runs the tool calls of the policy's answers and appends their results, until an answer calls no tool.
    An episode is one token stream."""

    calls_tools = True

    def __init__(
        self,
        tools: Sequence[Callable | Tool | ToolServer],
        *,
        tool_parser: str = "hermes",
        call_mark: str = "<tool_call>",
        mistakes: Sequence[type[Exception]] = (),
        max_result_length: int = 8000,
    ) -> None:
        """`tool_parser`: the name of a vLLM tool parser. `call_mark`: text that marks an attempted call; if
        the parser finds no call in an answer with it, the policy is told so. `mistakes`: exceptions of tools
        that count as the policy's mistakes, beside ToolError. `max_result_length`: characters of a result;
        the middle of a longer one is left out."""
        super().__init__()
        self.tools = [_source(tool) for tool in tools]
        self.tool_parser, self.call_mark = tool_parser, call_mark
        self.mistakes: tuple[type[Exception], ...] = (ToolError, *mistakes)
        self.max_result_length = max_result_length

    def check_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Logs a warning if the chat template renders answers differently than they were sampled, or does not
        list the tools."""
        for remark in probe(tokenizer, with_tools=True):
            logger.warning("%s The sampled tokens are kept.", remark)
        stream, asked = ChatStream(tokenizer), self.messages("?", None)
        if stream.render(asked) == stream.render(asked, [TOOL]):
            logger.warning("the chat template does not list the tools; describe them in messages()")

    @abstractmethod
    async def reward(self, prompt: str, label: Any, messages: Sequence[Message]) -> Any:
        """Returns the episode's reward: a number, or a dictionary with `reward` and optionally `scores`,
        `extra_logs` and `extra_texts`, see AgentExecutorBase. `messages`: the whole conversation in OpenAI's
        format. The last message is an answer without calls, unless a limit ended the episode. A method that
        is not `async` runs in a thread."""

    def messages(self, prompt: str, label: Any) -> list[Message]:
        """Returns the messages that the policy reads first."""
        return [{"role": "user", "content": prompt}]

    async def play(
        self, prompt: str, label: Any, session: Callable[[], Session], step_timeout: float | None
    ) -> dict:
        async with AsyncExitStack() as servers:
            toolbox = Toolbox(await self._open(servers, step_timeout), self, step_timeout)
            messages = self.messages(prompt, label)
            ending = await self._converse(session(), toolbox, messages)
            if ending == "abort":
                return {"reward": None}
            result = await called(partial(self.reward, prompt, label, messages))
        result = result if isinstance(result, dict) else {"reward": result}
        logs = {"tool_calls": toolbox.num_calls, "tool_errors": toolbox.num_errors}
        logs |= result.get("extra_logs") or {}
        return {"truncated": ending != "stop"} | result | {"extra_logs": logs}

    async def _open(self, servers: AsyncExitStack, seconds: float | None) -> list[Tool]:
        """Returns the tools of one episode; opening a server may take `seconds`."""
        found: list[Tool] = []
        for source in self.tools:
            if isinstance(source, Tool):
                found.append(source)
            else:
                opening = servers.enter_async_context(source.tools())
                found += await within(seconds, opening, f"{source}: the start")
        return found

    async def _converse(self, session: Session, toolbox: "Toolbox", messages: list[Message]) -> str:
        """Appends answers and tool results to `messages` until an answer calls no tool or a limit is reached.
        Returns the reason for the end: "stop", "length", "turns" or "abort"."""
        while session.turns_left != 0:
            try:
                answer = await session.complete({"messages": messages, "tools": toolbox.descriptions})
            except BadRequest as error:
                if error.code == "context_length_exceeded" and session.num_turns:
                    return "length"
                raise
            choice = answer["choices"][0]
            messages.append(choice["message"])
            if choice["finish_reason"] in ("abort", "length"):
                return choice["finish_reason"]
            if not (results := await toolbox.answer(choice["message"])):
                return "stop"
            messages += results
        return "turns"


def _source(tool: Any) -> Tool | ToolServer:
    if isinstance(tool, Tool) or callable(getattr(tool, "tools", None)):
        return tool
    if inspect.isroutine(tool):
        return function_tool(tool)
    raise TypeError(f"{tool!r} is neither a function nor a Tool nor a server of tools")


class Toolbox:
    """The tools of one episode, with counts of calls and errors."""

    def __init__(self, tools: Sequence[Tool], executor: ToolAgentExecutor, timeout: float | None) -> None:
        self.executor, self.timeout = executor, timeout
        self.num_calls = self.num_errors = 0
        self.descriptions = [tool.description for tool in tools]
        self.calls = {tool.name: tool.call for tool in tools}
        if len(self.calls) != len(tools):
            names = sorted(tool.name for tool in tools)
            text = f"the names of tools must be different: {', '.join(names)}"
            raise UsageError(ErrorCode.USER_CODE, text)

    async def answer(self, message: Message) -> list[Message]:
        """Runs all tool calls of an answer concurrently and returns their results as messages; none if it
        calls no tool."""
        calls = message.get("tool_calls") or []
        if not calls and self.executor.call_mark in behind_thoughts(message["content"]):
            self.num_errors += 1
            return [{"role": "user", "content": UNREADABLE}]
        tasks = [asyncio.create_task(self._result(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _result(self, call: dict[str, Any]) -> Message:
        name = call["function"]["name"]
        try:
            result = await self._call(name, call["function"]["arguments"])
        except self.executor.mistakes as error:
            self.num_errors += 1
            result = f"Error: {error}"
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)
        content = _shortened(text, self.executor.max_result_length)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    async def _call(self, name: str, arguments: str) -> Any:
        self.num_calls += 1
        if name not in self.calls:
            raise ToolError(f"there is no tool {name}; there are {', '.join(self.calls)}")
        return await within(self.timeout, self.calls[name](arguments), name)


def _plain(value: Any) -> Any:
    """Returns what JSON can hold: numbers and lists of NumPy and torch, and the text of anything else."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


UNREADABLE = "Error: this call of a tool cannot be read. Write its name and arguments as JSON."


def _shortened(text: str, length: int) -> str:
    """Cuts the middle out of a text longer than `length` characters."""
    if len(text) <= length:
        return text
    start, end = length - length // 2, len(text) - length // 2
    return f"{text[:start]}\n[{end - start} characters left out]\n{text[end:]}"
