"""A sandbox for untrusted code, for users' files. Defined in openrlhf/agents/sandbox.py."""

from openrlhf.agents.sandbox import Sandbox as Sandbox
from openrlhf.agents.sandbox import SandboxResult as SandboxResult
from openrlhf.agents.sandbox import SandboxUnavailable as SandboxUnavailable
from openrlhf.agents.sandbox import Status as Status
