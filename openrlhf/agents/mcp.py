"""Tools of MCP servers, called through the official client: the package `mcp`, major version 1 or 2.

A ToolAgentExecutor takes servers in its list of tools:

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
from openrlhf.errors import ErrorCode, RunError, UsageError

if TYPE_CHECKING:
    from mcp import StdioServerParameters
    from pydantic import BaseModel

NOT_INSTALLED = 'mcp is not installed; run: pip install "openrlhf[mcp]"'
OTHER_GENERATION = (
    "The server needs another major version of mcp than its Python has: mcp.server.fastmcp is in version 1, "
    'mcp.server.mcpserver in version 2. Choose it in the command: ["uvx", "--with", "mcp<2", ...].'
)
LAST_CHARACTERS = 2000
"""Number of characters of a server's stderr that an error quotes."""


class McpServerFailed(RunError):
    """Raised when a server does not start, has ended, or violates the protocol."""

    def __init__(self, server: "McpServer", reason: str) -> None:
        super().__init__(ErrorCode.EPISODES_FAILED, reason, value=server)
        self.args = (server, reason)  # pickle creates a copy with these arguments
        self.server, self.reason = server, reason


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """An MCP server, given by a command or a URL. A `command` starts one process per episode, so that
    episodes share nothing. At a `url` (streamable HTTP) a server runs already, and each episode opens a
    session."""

    command: Sequence[str] = ()
    url: str = ""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the command's process, beside HOME, PATH and similar defaults."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url) or isinstance(self.command, str):
            text = "expects either a command, as a list of words, or a url"
            raise UsageError(ErrorCode.INVALID_VALUE, text, value=self)
        if find_spec("mcp") is None:
            raise ImportError(NOT_INSTALLED)

    def __str__(self) -> str:
        return f"MCP server {self.url or ' '.join(self.command)!r}"

    @asynccontextmanager
    async def tools(self) -> AsyncIterator[list[Tool]]:
        """Yields the tools that the server lists. Raises McpServerFailed if the server cannot be reached or
        shut down."""
        failure: Exception | None = None
        with ServerOutput.kept() as output:
            try:
                async with self._session(output) as session:
                    tools = [self._tool(session, _plain(tool)) for tool in await _listed(session)]
                    try:
                        yield tools
                    except Exception as error:  # an error of the episode, not of the client
                        failure = error
            except Exception as error:
                first, details = _first(error), output.details()
                reason = f"{str(first) or type(first).__name__}{details}"
                # Once the process has ended, the client's own traceback adds nothing.
                raise McpServerFailed(self, reason) from (None if details else first)
            if isinstance(failure, McpServerFailed) and failure.server is self:
                raise McpServerFailed(self, f"{failure.reason}{output.details()}") from None
            if failure is not None:
                raise failure

    @asynccontextmanager
    async def _session(self, output: "ServerOutput") -> AsyncIterator[Any]:
        """Opens a session of the installed client; both versions have `list_tools` and `call_tool`."""
        mcp = _library()
        if self.url:
            transport = mcp.client.streamable_http.streamable_http_client(self.url)
        else:
            transport = mcp.stdio_client(self._process(output), errlog=output.errors)
        if hasattr(mcp, "Client"):
            async with mcp.Client(transport) as client:
                yield client
        else:
            async with transport as (read, write, *_), mcp.ClientSession(read, write) as session:
                await session.initialize()
                yield session

    def _process(self, output: "ServerOutput") -> "StdioServerParameters":
        """Builds a shell command that runs the server and writes its exit code, which the client does not
        report, to a file."""
        words = ["-c", '"$@"; echo $? > "$0"', str(output.code), *self.command]
        return _library().StdioServerParameters(command="/bin/sh", args=words, env=dict(self.environment))

    def _tool(self, session: Any, tool: Mapping[str, Any]) -> Tool:
        name = tool["name"]

        async def call(text: str) -> str:
            try:
                result = _plain(await session.call_tool(name, json_object(text)))
            except _protocol_error() as error:
                if error.error.code == _library().types.INVALID_PARAMS:
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
class ServerOutput:
    """Exit code and stderr of a server's process, kept for error messages."""

    code: Path
    """File with the exit code; does not exist if the process was killed."""
    errors: TextIO
    """File with the process's stderr."""

    @classmethod
    @contextmanager
    def kept(cls) -> Iterator[Self]:
        """Creates the files. On exit, writes the stderr that no error has quoted to this process's stderr."""
        with (
            TemporaryDirectory(prefix="mcp-") as folder,
            open(f"{folder}/stderr", "w+", encoding="utf-8", errors="replace") as errors,
        ):
            output = cls(Path(folder) / "exit_code", errors)
            try:
                yield output
            finally:
                sys.stderr.write(output.take_stderr())

    def take_stderr(self) -> str:
        """Returns the stderr written so far and clears the file."""
        self.errors.seek(0)
        text = self.errors.read()
        self.errors.truncate(0)
        return text

    def details(self) -> str:
        """Returns the end of an error message: the exit code and the last line of stderr, followed by the
        last LAST_CHARACTERS of stderr; "" if there are neither."""
        code = f", exit code {self.code.read_text(encoding='utf-8').strip()}" if self.code.exists() else ""
        text = self.take_stderr().strip()
        if not text:
            return code
        lines = [f"{code}: {text.splitlines()[-1]}", "stderr of the server:", text[-LAST_CHARACTERS:]]
        if "No module named 'mcp.server." in text:
            lines.append(OTHER_GENERATION)
        return "\n".join(lines)


def _library():
    """Imports the optional package `mcp`."""
    import mcp.client.streamable_http

    return mcp


def _protocol_error() -> type[Any]:
    """Returns the client's exception class for error responses of a server."""
    mcp = _library()
    if hasattr(mcp, "MCPError"):
        return mcp.MCPError
    return mcp.McpError  # pyrefly: ignore[missing-attribute]  the name in version 1


def _plain(model: "BaseModel") -> dict[str, Any]:
    """Dumps a model of the client by the protocol's field names, which both versions share."""
    return model.model_dump(mode="json", by_alias=True)


async def _listed(session: Any) -> "list[BaseModel]":
    page = await session.list_tools()
    tools = [*page.tools]
    while cursor := _plain(page).get("nextCursor"):
        page = await session.list_tools(cursor=cursor)
        tools += page.tools
    return tools


def _text(result: Mapping[str, Any]) -> str:
    """Returns the text of a tool's result; other content is replaced by its type, as in "[image]"."""
    parts = (part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in result["content"])
    return "\n".join(parts)


def _first(error: BaseException) -> BaseException:
    """Returns the first error within exception groups, in which the client's tasks wrap theirs."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
