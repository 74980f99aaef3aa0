"""Agents of users' files: openrlhf/agents/base.py under the name that they import."""

from openrlhf.agents.base import (
    AgentExecutorBase,
    AgentInstanceBase,
    Engine,
    MultiTurnAgentExecutor,
    Reward,
    RewardError,
    SingleTurnAgentExecutor,
    StepTimeout,
    call_in_time,
)

__all__ = [
    "AgentExecutorBase",
    "AgentInstanceBase",
    "Engine",
    "MultiTurnAgentExecutor",
    "Reward",
    "RewardError",
    "SingleTurnAgentExecutor",
    "StepTimeout",
    "call_in_time",
]
