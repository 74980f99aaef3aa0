"""Tools of MCP servers, by the official client.

They stand in the list of a ToolAgentExecutor:

    [McpServer(command=["uvx", "mcp-server-time"]), McpServer(url="http://127.0.0.1:8000/mcp")]
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openrlhf.utils.tools import Tool, ToolError, json_object

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult
    from mcp_types import Tool as McpTool


class McpServerFailed(RuntimeError):
    """A server does not start, has ended, or does not answer as MCP has it."""


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

    def __str__(self) -> str:
        return f"MCP server {self.url or ' '.join(self.command)!r}"

    @asynccontextmanager
    async def tools(self) -> AsyncIterator[list[Tool]]:
        """Those that it lists. McpServerFailed where it cannot be reached, or not ended."""
        from mcp import Client

        failure: Exception | None = None
        try:
            async with Client(self._transport()) as client:
                tools = [self._tool(client, tool) for tool in await _listed(client)]
                try:
                    yield tools
                except Exception as error:  # what happens in an episode is none of the client's failures
                    failure = error
        except Exception as error:
            raise McpServerFailed(f"{self}: {_first(error)}") from error
        if failure is not None:
            raise failure

    def _transport(self) -> Any:
        from mcp import StdioServerParameters, stdio_client

        if self.url:
            return self.url
        program, *arguments = self.command
        return stdio_client(
            StdioServerParameters(command=program, args=arguments, env=dict(self.environment))
        )

    def _tool(self, client: "Client", tool: "McpTool") -> Tool:
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS

        async def call(text: str) -> str:
            try:
                result = await client.call_tool(tool.name, json_object(text))
            except MCPError as error:
                if error.code == INVALID_PARAMS:
                    raise ToolError(error.message) from error
                raise McpServerFailed(f"{self}: {tool.name}: {error}") from error
            if result.is_error:
                raise ToolError(_text(result))
            return _text(result)

        function = {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        return Tool(tool.name, {"type": "function", "function": function}, call)


async def _listed(client: "Client") -> "list[McpTool]":
    page = await client.list_tools()
    tools = [*page.tools]
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _text(result: "CallToolResult") -> str:
    """What a policy can read of it."""
    parts = (part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
    return "\n".join(parts)


def _first(error: BaseException) -> BaseException:
    """Of a group, which the client's tasks make of theirs."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
