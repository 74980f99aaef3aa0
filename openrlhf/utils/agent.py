"""The agent contract, for users' files. Defined in openrlhf/agents/base.py."""

from openrlhf.agents.base import AgentExecutorBase as AgentExecutorBase
from openrlhf.agents.base import AgentInstanceBase as AgentInstanceBase
from openrlhf.agents.base import Engine as Engine
from openrlhf.agents.base import MultiTurnAgentExecutor as MultiTurnAgentExecutor
from openrlhf.agents.base import Reward as Reward
from openrlhf.agents.base import RewardError as RewardError
from openrlhf.agents.base import SingleTurnAgentExecutor as SingleTurnAgentExecutor
from openrlhf.agents.base import StepTimeout as StepTimeout
from openrlhf.agents.base import call_in_time as call_in_time
