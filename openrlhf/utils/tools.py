"""Agents that call tools: openrlhf/agents/tools.py under the name that users' files import."""

from openrlhf.agents.tools import (
    Tool,
    ToolAgentExecutor,
    Toolbox,
    ToolError,
    ToolServer,
    function_tool,
)

__all__ = [
    "Tool",
    "ToolAgentExecutor",
    "ToolError",
    "ToolServer",
    "Toolbox",
    "function_tool",
]
