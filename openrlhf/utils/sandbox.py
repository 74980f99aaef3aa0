"""Code that nobody trusts: openrlhf/agents/sandbox.py under the name that users' files import."""

from openrlhf.agents.sandbox import (
    Sandbox,
    SandboxResult,
    SandboxUnavailable,
    Status,
)

__all__ = [
    "Sandbox",
    "SandboxResult",
    "SandboxUnavailable",
    "Status",
]
