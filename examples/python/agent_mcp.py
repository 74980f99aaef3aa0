"""Agent with the tools of an MCP server, here mcp_shop.py. Any other server works too:
McpServer(command=["uvx", "mcp-server-time"]), or McpServer(url="http://127.0.0.1:8000/mcp") if it runs.

--train.agent_func_path examples/python/agent_mcp.py --train.max_turns 4 --data.label_key label

Leave --data.apply_chat_template out: the policy's template renders messages and tools.
"""

import sys
from pathlib import Path

from openrlhf.agents.mcp import McpServer
from openrlhf.agents.tools import ToolAgentExecutor

SHOP = McpServer(command=[sys.executable, str(Path(__file__).with_name("mcp_shop.py"))])


class AgentExecutor(ToolAgentExecutor):
    def __init__(self):
        super().__init__([SHOP], tool_parser="hermes")

    async def reward(self, prompt, label, messages):
        return float(label in (messages[-1]["content"] or ""))
