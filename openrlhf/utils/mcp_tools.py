"""Tools of MCP servers, for users' files. Defined in openrlhf/agents/mcp.py."""

from openrlhf.agents.mcp import McpServer as McpServer
from openrlhf.agents.mcp import McpServerFailed as McpServerFailed
