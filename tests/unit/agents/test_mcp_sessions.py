"""Tools of an MCP server and the output of its process, without the process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")
from mcp.types import CallToolResult, ListToolsResult

from openrlhf.agents.mcp import McpServer, McpServerFailed, ServerOutput
from openrlhf.agents.tools import ToolError


class Session:
    """A session with a server that lists one tool on each of two pages."""

    async def list_tools(self, cursor: str | None = None) -> ListToolsResult:
        tool = {"name": f"page{cursor or 1}", "description": "Says it.", "inputSchema": {"type": "object"}}
        return ListToolsResult.model_validate({"tools": [tool], "nextCursor": None if cursor else "2"})

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        said = [
            {"type": "text", "text": f"{name}: {arguments}"},
            {"type": "image", "data": "", "mimeType": "a"},
        ]
        return CallToolResult.model_validate({"content": said, "isError": "wrong" in arguments})


class InProcess(McpServer):
    """A server without a process, whose client's tasks wrap errors in a group as the real one's do."""

    @asynccontextmanager
    async def _session(self, output: ServerOutput) -> AsyncIterator[Session]:
        try:
            yield Session()
        except ConnectionError as error:
            output.errors.write("no key\n")
            raise ExceptionGroup("tasks", [error]) from None


SERVER = InProcess(command=["server", "--fast"])


def test_the_tools_of_all_pages_can_be_called() -> None:
    async def run() -> None:
        async with SERVER.tools() as tools:
            assert [tool.name for tool in tools] == ["page1", "page2"]
            function = {"name": "page2", "description": "Says it.", "parameters": {"type": "object"}}
            assert tools[1].description == {"type": "function", "function": function}
            assert await tools[1].call('{"a": 1}') == "page2: {'a': 1}\n[image]"
            with pytest.raises(ToolError, match=r"page1: .*wrong"):
                await tools[0].call('{"wrong": 1}')

    asyncio.run(run())


def test_an_error_of_the_client_is_the_servers_and_others_stay(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail(error: BaseException) -> None:
        async with SERVER.tools():
            raise error

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(fail(KeyError("mine")))
    assert capsys.readouterr().err == ""


def test_a_server_that_cannot_be_reached_is_told_with_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    class Gone(InProcess):
        @asynccontextmanager
        async def _session(self, output: ServerOutput) -> AsyncIterator[Session]:
            output.code.write_text("3\n")
            output.errors.write("reading the key\nno key\n")
            raise ExceptionGroup("tasks", [ConnectionError("closed")])
            yield

    async def run() -> None:
        async with Gone(command=["server", "--fast"]).tools():
            pass

    with pytest.raises(McpServerFailed) as failed:
        asyncio.run(run())
    assert failed.value.reason == (
        "closed, exit code 3: no key\nstderr of the server:\nreading the key\nno key"
    )
    assert capsys.readouterr().err == ""  # told once, in the error


def test_the_output_of_a_server_is_taken_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerOutput.kept() as output:
        assert output.details() == ""
        output.code.write_text("1\n")
        assert output.details() == ", exit code 1"
        output.errors.write("a: b\nlast\n")
        assert output.details() == ", exit code 1: last\nstderr of the server:\na: b\nlast"
        assert output.take_stderr() == ""
        output.errors.write("No module named 'mcp.server.neither'")
        assert "major version" in output.details()
        output.errors.write("goodbye\n")
    assert capsys.readouterr().err.endswith("goodbye\n")
