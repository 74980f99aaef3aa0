"""Agents that use the `openai` client: openrlhf/agents/openai.py under the name that users' files import."""

from openrlhf.agents.openai import (
    MODEL,
    BadRequest,
    OpenAIAgentExecutor,
    Server,
    Session,
)

__all__ = [
    "MODEL",
    "BadRequest",
    "OpenAIAgentExecutor",
    "Server",
    "Session",
]
