"""Tools of MCP servers: openrlhf/agents/mcp.py under the name that users' files import."""

from openrlhf.agents.mcp import (
    McpServer,
    McpServerFailed,
)

__all__ = [
    "McpServer",
    "McpServerFailed",
]
