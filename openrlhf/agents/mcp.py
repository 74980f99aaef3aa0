"""Tools of MCP servers, by the official client: `mcp` of generation 1 or 2.

They stand in the list of a ToolAgentExecutor:

    [McpServer(command=["uvx", "mcp-server-time"]), McpServer(url="http://127.0.0.1:8000/mcp")]
"""

import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, TextIO

from openrlhf.agents.tools import Tool, ToolError, json_object

if TYPE_CHECKING:
    from mcp import StdioServerParameters
    from pydantic import BaseModel

NOT_INSTALLED = 'mcp is not installed; run: pip install "openrlhf[mcp]"'
OTHER_GENERATION = (
    "The server is written for another generation of mcp than its Python has: mcp.server.fastmcp is of 1, "
    'mcp.server.mcpserver of 2. Give it the other one: command=["uvx", "--with", "mcp<2", ...].'
)
LAST_CHARACTERS = 2000
"""Of what a server wrote to stderr, in an error."""


class McpServerFailed(RuntimeError):
    """A server does not start, has ended, or does not answer as MCP has it."""

    def __init__(self, server: "McpServer", reason: str) -> None:
        super().__init__(f"{server}: {reason}")
        self.server, self.reason = server, reason


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """One of a `command` is started for each episode and ends with it, so that episodes share nothing. At
    a `url` (streamable HTTP) one runs already, and each episode has a session of its own."""

    command: Sequence[str] = ()
    url: str = ""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of a command's process, which else has only HOME, PATH and the like."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url) or isinstance(self.command, str):
            raise ValueError(f"{self}: either a command, which is a list of words, or a url")
        if find_spec("mcp") is None:
            raise ImportError(NOT_INSTALLED)

    def __str__(self) -> str:
        return f"MCP server {self.url or ' '.join(self.command)!r}"

    @asynccontextmanager
    async def tools(self) -> AsyncIterator[list[Tool]]:
        """Those that it lists. McpServerFailed where it cannot be reached, or not ended."""
        failure: Exception | None = None
        with Remains.kept() as remains:
            try:
                async with self._session(remains) as session:
                    tools = [self._tool(session, _plain(tool)) for tool in await _listed(session)]
                    try:
                        yield tools
                    except Exception as error:  # what happens in an episode is none of the client's failures
                        failure = error
            except Exception as error:
                first, told = _first(error), remains.told()
                reason = f"{str(first) or type(first).__name__}{told}"
                # Of a process that has ended, the lines of the client that noticed it say nothing.
                raise McpServerFailed(self, reason) from (None if told else first)
            if isinstance(failure, McpServerFailed) and failure.server is self:
                raise McpServerFailed(self, f"{failure.reason}{remains.told()}") from None
            if failure is not None:
                raise failure

    @asynccontextmanager
    async def _session(self, remains: "Remains") -> AsyncIterator[Any]:
        """The installed client: in both generations it has `list_tools` and `call_tool`."""
        import mcp
        from mcp.client.streamable_http import streamable_http_client

        if self.url:
            transport = streamable_http_client(self.url)
        else:
            transport = mcp.stdio_client(self._process(remains), errlog=remains.errors)
        if hasattr(mcp, "Client"):
            async with mcp.Client(transport) as client:
                yield client
        else:
            async with transport as (read, write, *_), mcp.ClientSession(read, write) as session:
                await session.initialize()
                yield session

    def _process(self, remains: "Remains") -> "StdioServerParameters":
        """A shell that starts the command and leaves its exit code, which the client does not tell."""
        from mcp import StdioServerParameters

        words = ["-c", '"$@"; echo $? > "$0"', str(remains.code), *self.command]
        return StdioServerParameters(command="/bin/sh", args=words, env=dict(self.environment))

    def _tool(self, session: Any, tool: Mapping[str, Any]) -> Tool:
        from mcp.types import INVALID_PARAMS

        name = tool["name"]

        async def call(text: str) -> str:
            try:
                result = _plain(await session.call_tool(name, json_object(text)))
            except _protocol_error() as error:
                if error.error.code == INVALID_PARAMS:
                    raise ToolError(error.error.message) from error
                raise McpServerFailed(self, f"{name}: {error}") from error
            if result.get("isError"):
                raise ToolError(_text(result))
            return _text(result)

        function = {
            "name": name,
            "description": tool.get("description") or "",
            "parameters": tool["inputSchema"],
        }
        return Tool(name, {"type": "function", "function": function}, call)


@dataclass(frozen=True)
class Remains:
    """What is left of a command's process when it has ended."""

    code: Path
    """A file with its exit code; none where it was killed."""
    errors: TextIO
    """What it wrote to stderr, in a file."""

    @classmethod
    @contextmanager
    def kept(cls) -> Iterator[Self]:
        """What no error tells of the process's stderr goes to that of this one in the end."""
        with (
            TemporaryDirectory(prefix="mcp-") as folder,
            open(f"{folder}/stderr", "w+", errors="replace") as errors,
        ):
            remains = cls(Path(folder) / "exit_code", errors)
            try:
                yield remains
            finally:
                sys.stderr.write(remains._taken())

    def _taken(self) -> str:
        """stderr, which is empty then."""
        self.errors.seek(0)
        text = self.errors.read()
        self.errors.truncate(0)
        return text

    def told(self) -> str:
        """The end of an error: the exit code and the last line of stderr, and on further lines all of it. ""
        where there is nothing to tell."""
        code = f", exit code {self.code.read_text().strip()}" if self.code.exists() else ""
        text = self._taken().strip()
        if not text:
            return code
        lines = [f"{code}: {text.splitlines()[-1]}", "its stderr:", text[-LAST_CHARACTERS:]]
        if "No module named 'mcp.server." in text:
            lines.append(OTHER_GENERATION)
        return "\n".join(lines)


def _protocol_error() -> type[Any]:
    """The client's error for an error that a server answers with."""
    import mcp

    if hasattr(mcp, "MCPError"):
        return mcp.MCPError
    return mcp.McpError  # pyrefly: ignore[missing-attribute]  the name in generation 1


def _plain(model: "BaseModel") -> dict[str, Any]:
    """By the names of the protocol, which are the same for both generations."""
    return model.model_dump(mode="json", by_alias=True)


async def _listed(session: Any) -> "list[BaseModel]":
    page = await session.list_tools()
    tools = [*page.tools]
    while cursor := _plain(page).get("nextCursor"):
        page = await session.list_tools(cursor=cursor)
        tools += page.tools
    return tools


def _text(result: Mapping[str, Any]) -> str:
    """What a policy can read of it."""
    parts = (part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in result["content"])
    return "\n".join(parts)


def _first(error: BaseException) -> BaseException:
    """Of a group, which the client's tasks make of theirs."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
