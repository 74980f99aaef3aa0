"""The public names: `import openrlhf as rl` has each of them as `rl.NAME`, loaded when it is first used.

A loop of one's own needs `Run`; the other names are the records and base classes that its verbs take and
return. What is not listed here may change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrlhf.agents.base import AgentExecutorBase, AgentInstanceBase
    from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
    from openrlhf.algorithms.policy_losses.base import PolicyLoss, RowView
    from openrlhf.errors import RunError, UsageError
    from openrlhf.loop.lanes import Result
    from openrlhf.loop.run import Run
    from openrlhf.observability.hooks.base import Evaluation, Hook, Step
    from openrlhf.types import Batch, Outcome, Prompt, PromptGroup, Trajectory

PLACES = {
    **dict.fromkeys(("AgentExecutorBase", "AgentInstanceBase"), "agents.base"),
    **dict.fromkeys(("AdvantageEstimator", "StepView"), "algorithms.advantages.base"),
    **dict.fromkeys(("PolicyLoss", "RowView"), "algorithms.policy_losses.base"),
    **dict.fromkeys(("RunError", "UsageError"), "errors"),
    "Result": "loop.lanes",
    "Run": "loop.run",
    **dict.fromkeys(("Evaluation", "Hook", "Step"), "observability.hooks.base"),
    **dict.fromkeys(("Batch", "Outcome", "Prompt", "PromptGroup", "Trajectory"), "types"),
}
"""Public name -> its module in this package."""


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"openrlhf has no public name {name!r}; there are {', '.join(sorted(PLACES))}")
    return getattr(import_module(f"openrlhf.{PLACES[name]}"), name)
