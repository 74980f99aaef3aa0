"""Agents that use the `openai` client, for users' files. Defined in openrlhf/agents/openai.py."""

from openrlhf.agents.openai import MODEL as MODEL
from openrlhf.agents.openai import BadRequest as BadRequest
from openrlhf.agents.openai import OpenAIAgentExecutor as OpenAIAgentExecutor
from openrlhf.agents.openai import Server as Server
from openrlhf.agents.openai import Session as Session
