"""Support for agent files of Molt: their `from molt.agents import ...` finds the classes of this module where
that package is not installed, and executors run their environments and chat agents."""

import copy
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from openrlhf.agents.base import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor, called
from openrlhf.agents.openai import OpenAIAgentExecutor, Session
from openrlhf.user_file import UnusableFile


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
    """Score that filtering and evaluation read, of the last turn; None: the turn's reward."""
    images: list | None = None
    sampling_params: Any = None


class Env(ABC):
    """The environment of one episode."""

    async def reset(self, state: dict, **kwargs: Any) -> Any:
        return state

    @abstractmethod
    async def step(self, state: dict, **kwargs: Any) -> Result: ...

    async def close(self) -> None:
        return


@dataclass
class ChatContext:
    """What a ChatAgent knows of its episode."""

    messages: list
    tools: list | None
    prompt: str
    label: Any
    images: list | None
    base_url: str
    """URL for clients of OpenAI."""
    session_url: str
    """URL for clients of Anthropic, which add /v1 themselves."""
    model_name: str
    api_key: str
    session_id: str
    sampling_params: Any
    max_length: int


class ChatAgent(ABC):
    """An agent whose own loop asks the policy over HTTP; one for each episode."""

    @abstractmethod
    async def run(self, ctx: ChatContext) -> Result: ...


class Runner:
    """Base class of the runners, of which a file has one, `AgentRunner`."""

    def __init__(self, played: type) -> None:
        """`played`: the class of which every episode has an object."""
        self.played = played


class StepEnvRunner(Runner):
    """Plays an Env."""


class ChatAgentRunner(Runner):
    """Plays a ChatAgent."""


def install() -> None:
    """Makes `molt.agents` importable, unless the package is installed."""
    if "molt" not in sys.modules and importlib.util.find_spec("molt") is None:
        package, agents = ModuleType("molt"), sys.modules[__name__]
        package.__dict__.update(__path__=[], agents=agents)
        names = ("molt.agents", "molt.agents.base", "molt.agents.chat_agent")
        sys.modules.update({"molt": package, **dict.fromkeys(names, agents)})


def is_runner(found: Any) -> bool:
    """Tells whether an object of a user's file is a runner, of this module or of Molt's."""
    agents = sys.modules.get("molt.agents")
    return agents is not None and inspect.isclass(found) and issubclass(found, agents.Runner)


def executor_class(runner: type) -> type[AgentExecutorBase]:
    """Returns the executor of the runner's environment or chat agent. Raises UnusableFile for other
    runners."""
    made = runner()
    for played in filter(inspect.isclass, vars(made).values()):
        if callable(getattr(played, "run", None)):
            return _chat_executor(played, getattr(made, "tool_parser", None))
        if callable(getattr(played, "step", None)):
            return _env_executor(played)
    raise UnusableFile(f"{runner.__name__} runs neither an Env nor a ChatAgent; write an AgentExecutor")


def _env_executor(env_class: type) -> type[AgentExecutorBase]:
    class EnvInstance(AgentInstanceBase):
        def __init__(self) -> None:
            self.env = env_class()

        async def reset(self, states: dict, **kwargs: Any) -> dict:
            first = await called(partial(self.env.reset, states))
            return first if isinstance(first, Mapping) else states

        async def step(self, states: dict, **kwargs: Any) -> dict:
            result = await called(partial(self.env.step, states))
            return _common(result) | {
                "rewards": result.reward,
                "environment_feedback": result.observation,
                "environment_images": result.images,
                "sampling_params": result.sampling_params,
                "done": result.terminated or result.truncated,
            }

        async def close(self) -> None:
            await called(self.env.close)

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
            result = await agent_class().run(_context(prompt, label, session))
            return _common(result) | {"reward": result.reward}

    return ChatExecutor


def _common(result: Any) -> dict:
    """Returns the values of a Result that turns and episodes share."""
    score = result.reward if result.score is None else result.score
    truncated = True if result.truncated else None  # None: the last answer decides
    return {"scores": score, "extra_logs": result.info, "truncated": truncated}


def _context(prompt: str, label: Any, session: Session) -> ChatContext:
    params = copy.copy(session.sampling_params)
    params.max_tokens = params.max_tokens or session.max_length
    messages: Sequence[dict] = [{"role": "user", "content": prompt}]
    return ChatContext(
        messages=list(messages),
        tools=None,
        prompt=prompt,
        label=label,
        images=None,
        base_url=session.base_url,
        session_url=session.base_url.removesuffix("/v1"),
        model_name=session.model,
        api_key=session.api_key,
        session_id=session.api_key,
        sampling_params=params,
        max_length=session.max_length,
    )
