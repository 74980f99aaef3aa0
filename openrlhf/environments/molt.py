"""Agent files of Molt as they are. Their `from molt.agents import ...` finds the classes of this module where
that package is not installed, and executors run their environments and chat agents."""

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from openrlhf.api import (
    AgentExecutorBase,
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    OpenAIAgentExecutor,
    Session,
)


@dataclass
class Result:
    """The result of a turn of an Env, or of a whole episode of a ChatAgent."""

    reward: Any = 0.0
    observation: str = ""
    """Text that the policy reads next."""
    terminated: bool = True
    truncated: bool = False
    """Whether a limit of the agent ended the episode."""
    info: dict = field(default_factory=dict)
    """Numbers by name, which become metrics."""
    score: Any = None
    """Score that filtering and evaluation read; None: the reward. That of the last turn counts."""
    images: list | None = None
    sampling_params: Any = None


class Env:
    """The environment of one episode. Subclasses define `async def step(self, state) -> Result`."""

    async def reset(self, state: dict, **kwargs: Any) -> Any:
        return state

    async def close(self) -> None:
        return


class ChatAgent:
    """An agent that asks the policy over HTTP; each episode has one. Subclasses define
    `async def run(self, ctx) -> Result`."""


class ChatContext(SimpleNamespace):
    """The episode of a ChatAgent, as it sees it."""


class Runner:
    """Base class of the runners, of which a file has one, `AgentRunner`."""

    def __init__(self, played: type) -> None:
        """`played`: a subclass of Env or ChatAgent."""
        self.played = played


class StepEnvRunner(Runner):
    """Plays an Env."""


class ChatAgentRunner(Runner):
    """Plays a ChatAgent."""


def adapter() -> Callable[[Any], Any]:
    """Makes `molt.agents` importable if the package is not installed. Returns a function that maps a runner
    to the class of its executor, and anything else to itself."""
    if "molt" not in sys.modules and importlib.util.find_spec("molt") is None:
        package, agents = ModuleType("molt"), sys.modules[__name__]
        package.__dict__.update(__path__=[], agents=agents)
        names = ("molt.agents", "molt.agents.base", "molt.agents.chat_agent")
        sys.modules.update({"molt": package, **dict.fromkeys(names, agents)})
    return lambda found: executor_class(found) if _is_runner(found) else found


def _is_runner(found: Any) -> bool:
    """Tells whether `found` is a runner, of this module or of Molt's own."""
    agents = sys.modules.get("molt.agents")
    return agents is not None and inspect.isclass(found) and issubclass(found, agents.Runner)


def executor_class(runner: type) -> type[AgentExecutorBase]:
    """Returns the executor of a runner's environment or chat agent. Raises TypeError for other runners."""
    made = runner()
    for played in filter(inspect.isclass, vars(made).values()):  # Molt's own name their class as they like
        if hasattr(played, "run"):
            return _chat_executor(played, getattr(made, "tool_parser", None))
        if hasattr(played, "step"):
            return _env_executor(played)
    raise TypeError(f"{runner.__name__} runs neither an Env nor a ChatAgent; write an AgentExecutor")


def _env_executor(env_class: type) -> type[AgentExecutorBase]:
    class EnvInstance(AgentInstanceBase):
        def __init__(self) -> None:
            self.env = env_class()

        async def reset(self, states: dict, **kwargs: Any) -> dict:
            first = await self.env.reset(states)
            return first if isinstance(first, dict) else states

        async def step(self, states: dict, **kwargs: Any) -> dict:
            result = await self.env.step(states)
            return _result(result, "rewards") | {
                "environment_feedback": result.observation,
                "environment_images": result.images,
                "sampling_params": result.sampling_params,
                "done": result.terminated,
            }

        async def close(self) -> None:
            await self.env.close()

    class EnvExecutor(MultiTurnAgentExecutor):
        def __init__(self) -> None:
            super().__init__(EnvInstance)

    return EnvExecutor


def _chat_executor(agent_class: type, tool_parser: str | None) -> type[AgentExecutorBase]:
    class ChatExecutor(OpenAIAgentExecutor):
        calls_tools = tool_parser is not None

        def __init__(self) -> None:
            super().__init__(tool_parser)

        async def run_agent(self, prompt: str, label: Any, session: Session) -> dict:
            return _result(await agent_class().run(_context(prompt, label, session)), "reward")

    return ChatExecutor


def _result(result: Any, reward: str) -> dict:
    """Returns the values of a Result that turns and episodes share, the reward under this name."""
    score = result.reward if result.score is None else result.score
    truncated = True if result.truncated else None  # None: the last answer decides
    return {reward: result.reward, "scores": score, "extra_logs": result.info, "truncated": truncated}


def _context(prompt: str, label: Any, session: Session) -> ChatContext:
    params = copy.copy(session.sampling_params)
    params.max_tokens = params.max_tokens or session.max_length
    about: Mapping[str, Any] = {"prompt": prompt, "label": label, "images": None, "tools": None}
    return ChatContext(
        **about,
        messages=[{"role": "user", "content": prompt}],
        base_url=session.base_url,
        session_url=session.base_url.removesuffix("/v1"),
        model_name=session.model,
        api_key=session.api_key,
        session_id=session.api_key,
        sampling_params=params,
        max_length=session.max_length,
    )
