"""Tools of real MCP servers, started by the executor and over HTTP."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import refused
from tool_episodes import END, call, play, said

from openrlhf.agents.base import StepTimeout
from openrlhf.agents.mcp import McpServer
from openrlhf.errors import ErrorCode
from openrlhf.types import Outcome

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[3]
SERVER = '''
import asyncio, os, sys
try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # version 1 of the SDK
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("tools")
number = 0

@server.tool()
def count(by: int) -> str:
    """Counts on."""
    global number
    number += by
    return f"{number} {os.environ.get('KEY')} {os.environ.get('SECRET')}"

@server.tool()
def fail() -> str:
    raise ValueError("not so")

@server.tool()
def die() -> str:
    os._exit(1)

@server.tool()
async def wait() -> str:
    await asyncio.sleep(1000)

if __name__ == "__main__":
    open(sys.argv[1], "a").write(f"{os.getpid()} ")
    server.run()
'''


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[McpServer]:
    """Returns a server that a command starts; checks after the test that none of its processes runs."""
    monkeypatch.setenv("SECRET", "of the run")
    (tmp_path / "server.py").write_text(SERVER)
    pids = tmp_path / "pids"
    words = [sys.executable, str(tmp_path / "server.py"), str(pids)]
    yield McpServer(command=words, environment={"KEY": "its own"})
    assert not [pid for pid in pids.read_text().split() if Path(f"/proc/{pid}").exists()]


def test_an_episode_has_a_server_of_its_own(server: McpServer) -> None:
    """The server's state is that of the episode; its environment has no secrets of the run."""
    twice = [call("count", by=1) + END, call("count", by=2) + END, f"2{END}"]
    for _ in range(2):
        assert said(*twice, tools=[server]) == ["1 its own None", "3 its own None"]
    assert len((Path(server.command[2])).read_text().split()) == 2


def test_mistakes_and_failures(server: McpServer) -> None:
    """The policy reads what the server calls an error; the death of a server ends the episode."""
    texts = said(call("fail") + call("count", by="x") + call("no") + END, f"2{END}", tools=[server])
    assert "not so" in texts[0] and "valid integer" in texts[1], texts
    assert re.search(r"\bno\b.*\bcount, fail, die, wait$", texts[2])
    t, _ = play(call("die") + END, f"2{END}", tools=[server])
    assert t.outcome is Outcome.ENV_ERROR, t.error
    assert "McpServerFailed: MCP server " in t.error and "server.py" in t.error
    assert "die: Connection closed, exit code 1" in t.error


def test_what_ends_an_episode_stays_what_it_is(server: McpServer) -> None:
    """The client's own tasks do not wrap it in an exception group, and the server ends with it."""

    async def fail(error: Exception) -> None:
        async with server.tools() as (_, *others):
            assert [tool.name for tool in others] == ["fail", "die", "wait"]
            raise error

    async def cancelled() -> None:
        async with server.tools() as tools:
            waiting = asyncio.create_task(tools[3].call("{}"))
            asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
            await waiting

    for error in (StepTimeout("late"), KeyError("mine")):
        with pytest.raises(type(error), match=error.args[0]):
            asyncio.run(fail(error))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_a_server_that_says_nothing() -> None:
    silent = McpServer(command=[sys.executable, "-c", "import sys; sys.stdin.read()"])
    t, _ = play(f"2{END}", tools=[silent], step_timeout=0.2)
    assert t.outcome is Outcome.TIMED_OUT
    assert "--rollout.step_timeout 0.2 s" in t.error


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["/nowhere/server"], [", exit code 127: ", "/nowhere/server: not found"]),
        ([sys.executable, "-c", "exit(3)"], [", exit code 3"]),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], [", exit code 137: ", "Killed"]),
        ([sys.executable, "-c", 'exit("no key")'], [", exit code 1: no key\n"]),
        (
            [sys.executable, "-c", "from mcp.server.neither import Server"],
            ["1: ModuleNotFoundError: No module named 'mcp.server.neither'\n", "\nTrace", "major version"],
        ),
    ],
)
def test_servers_that_do_not_start(command: list[str], told: list[str], capfd) -> None:
    t, _ = play(f"2{END}", tools=[McpServer(command=command)])
    assert t.outcome is Outcome.ENV_ERROR, t.error
    assert f"McpServerFailed: MCP server '{command[0]}" in t.error
    assert all(text in t.error for text in told), t.error
    assert "Exception Group" not in t.error and "mcp/client" not in t.error
    assert capfd.readouterr().err == ""  # reported once, in the error


def test_what_a_server_writes_to_stderr_is_not_lost(tmp_path: Path, capfd) -> None:
    (tmp_path / "server.py").write_text(SERVER + "    print('goodbye', file=sys.stderr)")
    words = [sys.executable, str(tmp_path / "server.py"), str(tmp_path / "pids")]
    assert said(call("count", by=1) + END, f"2{END}", tools=[McpServer(command=words)]) == ["1 None None"]
    assert capfd.readouterr().err.endswith("goodbye\n")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes when the agent's file is read, before a run starts."""
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ImportError, match=r'"openrlhf\[mcp\]"'):
        McpServer(command=["server"])


def test_how_a_server_is_named() -> None:
    for wrong in ({}, {"command": ["a"], "url": "http://a"}, {"command": "a b"}):
        with refused(ErrorCode.INVALID_VALUE):
            McpServer(**wrong)


HTTP = """
import socket, sys, uvicorn
from server import server
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run([listening])
"""


def test_a_server_over_http(tmp_path: Path) -> None:
    """Sessions of all episodes reach the same server."""
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, "-c", HTTP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            server = McpServer(url=f"http://127.0.0.1:{int(process.stdout.readline())}/mcp")
            for number in (1, 2):
                assert said(call("count", by=1) + END, f"2{END}", tools=[server]) == [f"{number} None None"]
        finally:
            process.kill()
    t, _ = play(f"2{END}", tools=[server])
    assert t.outcome is Outcome.ENV_ERROR and "McpServerFailed: MCP server 'http://127.0.0.1" in t.error


@pytest.mark.slow
def test_the_other_version_of_the_sdk(tmp_path: Path) -> None:
    """These tests run with a client of version 1, and its server with the installed client. Both
    versions depend on the same packages except one."""
    older = tmp_path / "older"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(older)]
    subprocess.run([*install, "mcp<2", "httpx-sse"], check=True)
    environment = {"PYTHONPATH": f"{older}:{ROOT}:{ROOT / 'tests' / 'helpers'}", "PATH": os.environ["PATH"]}
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(tests, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (tmp_path / "server.py").write_text(SERVER)
    words = [sys.executable, str(tmp_path / "server.py"), str(tmp_path / "pids")]
    server = McpServer(command=words, environment={"PYTHONPATH": str(older)})
    assert said(call("count", by=1) + END, f"2{END}", tools=[server]) == ["1 None None"]
