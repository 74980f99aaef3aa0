"""Agents that call tools, for users' files. Defined in openrlhf/agents/tools.py."""

from openrlhf.agents.tools import Tool as Tool
from openrlhf.agents.tools import ToolAgentExecutor as ToolAgentExecutor
from openrlhf.agents.tools import Toolbox as Toolbox
from openrlhf.agents.tools import ToolError as ToolError
from openrlhf.agents.tools import ToolServer as ToolServer
from openrlhf.agents.tools import function_tool as function_tool
