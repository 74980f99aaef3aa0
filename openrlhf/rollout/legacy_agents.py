"""Support for agent files of OpenRLHF 0.8: modules with a function `step`, and executors that get an engine
and a result queue when they are created."""

import inspect
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from openrlhf.agents.base import AgentExecutorBase, AgentInstanceBase, Engine, called
from openrlhf.user_file import run_file

# Versions 0.8.0 to 0.8.4: the module is the environment.


def step_environment(path: str) -> type[AgentInstanceBase]:
    """Returns a class around the module. Each instance runs the file again, so that every episode has its own
    globals."""

    class StepModule(AgentInstanceBase):
        def __init__(self) -> None:
            self.module = run_file(path, "agent_func")

        async def step(self, states: dict, **kwargs: Any) -> dict:
            return await _step(self.module.step, states)

    return StepModule


async def _step(function: Callable, states: Mapping[str, Any]) -> dict:
    """Calls `step(observation, action, label, ...)` and converts its result to the form of
    AgentInstanceBase.step."""
    more = {name: states[name] for name in accepted(function, ("sampling_params",))}
    texts = states["observation_text"], states["action_text"]
    answer = await called(partial(function, *texts, states["label"], **more))
    named = _named(answer) if isinstance(answer, tuple) else answer
    if not isinstance(named, Mapping):
        raise TypeError(f"step returned {type(answer).__name__}, not a dict or a tuple")
    return {NEW_NAMES.get(name, name): value for name, value in named.items()}


NEW_NAMES = {"reward": "rewards", "next_observation": "observation", "next_state": "observation"}


def _named(answer: tuple) -> dict:
    """Names the values of (reward, next observation, done[, logs]), in any order, by their types."""
    found: dict[str, Any] = {}
    for value in answer:
        kind = {bool: "done", str: "observation", dict: "extra_logs"}.get(type(value), "rewards")
        found[kind] = value
    return found


def accepted(function: Callable, names: Sequence[str]) -> tuple[str, ...]:
    """Returns those of `names` that a function accepts as keyword arguments."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in names if takes_all or name in parameters)


# Versions 0.8.5 to 0.8.10: an executor gets an engine and a queue when it is created, for all episodes.

CONSTRUCTOR_ARGUMENTS = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")

# bounded .get(): of context variables, which never wait.
_engine: ContextVar[Engine] = ContextVar("engine")
_results: ContextVar[list] = ContextVar("results")


def is_queue_executor(executor: type) -> bool:
    """Returns True if the constructor has all of CONSTRUCTOR_ARGUMENTS."""
    return executor.__init__ is not AgentExecutorBase.__init__ and set(CONSTRUCTOR_ARGUMENTS) <= set(
        inspect.signature(executor).parameters
    )


class QueueExecutor(AgentExecutorBase):
    """One executor of version 0.8.5 to 0.8.10 for all episodes of a process. Each episode runs in its own
    asyncio task; context variables of the task hold the episode's engine and results."""

    def __init__(
        self, executor_class: type, *, max_steps: int | None, max_length: int, tokenizer: Any
    ) -> None:
        """`max_steps`: maximum turns of an episode; None: limited by `max_length` only."""
        super().__init__()
        values = (max_steps or max_length, max_length, EngineOfEpisode(), tokenizer, QueueOfEpisode())
        self.executor = executor_class(**dict(zip(CONSTRUCTOR_ARGUMENTS, values, strict=True)))

    async def execute(self, prompt: str, label: Any, sampling_params: Any, llm_engine: Engine) -> Any:
        _engine.set(llm_engine)
        _results.set(results := [])
        returned = await self.executor.execute(prompt, label, sampling_params)
        return results[-1] if results else returned


class QueueOfEpisode:
    """A result queue that appends to the results of the current episode."""

    async def put(self, result: Any) -> None:
        self.put_nowait(result)

    def put_nowait(self, result: Any) -> None:
        _results.get().append(result)


class EngineOfEpisode:
    """The engine of the current episode, with the interfaces of `Engine` and of vLLM: `async for output in
    generate(prompt, params, id)`."""

    def generate(self, prompt: Any, sampling_params: Any, *others: Any, **more: Any) -> "Answer":
        token_ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
        return Answer(_engine.get(), list(token_ids), sampling_params)


class Answer:
    """A request that can be awaited, or iterated over as in vLLM."""

    def __init__(self, engine: Engine, token_ids: list[int], sampling_params: Any) -> None:
        self._request = lambda: engine.generate(token_ids, sampling_params)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._request().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield await self._request()
