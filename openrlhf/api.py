"""The public names: `import openrlhf as rl` has each of them as `rl.NAME`, loaded when it is first used.

A loop of one's own needs `Run`; the other names are the records and base classes that its verbs take and
return. What is not listed here may change without notice.
"""

from openrlhf.agents.base import AgentExecutorBase, AgentInstanceBase
from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.policy_losses.base import PolicyLoss, RowView
from openrlhf.errors import RunError, UsageError
from openrlhf.loop.lanes import Result
from openrlhf.loop.run import Run
from openrlhf.types import Batch, Outcome, Prompt, PromptGroup, Trajectory

__all__ = [
    "AdvantageEstimator",
    "AgentExecutorBase",
    "AgentInstanceBase",
    "Batch",
    "Outcome",
    "PolicyLoss",
    "Prompt",
    "PromptGroup",
    "Result",
    "RowView",
    "Run",
    "RunError",
    "StepView",
    "Trajectory",
    "UsageError",
]
