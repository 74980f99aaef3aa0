"""Users' executors: found in a file, and called with what they accept."""

import asyncio
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.rewards.function import IMPORT_LIMIT, check_file
from openrlhf.rewards.user_file import (
    IMPORT_DEADLINE,
    ImportTimeout,
    UnusableFile,
    import_file,
    import_problem,
    located,
)
from openrlhf.utils.agent import AgentExecutorBase, Engine, RewardError

if TYPE_CHECKING:  # the import of a file is checked without what takes seconds
    from transformers import PreTrainedTokenizerBase
    from vllm.sampling_params import SamplingParams

FORM = (
    "Define `class AgentExecutor(AgentExecutorBase)` with\n`async def execute(self, prompt, label, "
    "sampling_params, max_length, hf_tokenizer, llm_engine)`, which returns a dict."
)


class EnvironmentFailed(Exception):
    """What a user's executor raised, or why its answer cannot be used, in words with its file."""


def check_agent_file(path: str, flag: str, limit: float = IMPORT_LIMIT) -> str:
    """As rewards.function.check_file, for its class AgentExecutor. No object is made."""
    return check_file(path, flag, load_executor_class, limit)


def load_executor_class(path: str) -> type[Any]:
    """The file's class, if it can be made and called. UnusableFile otherwise, or what the file raises."""
    module = import_file(path, "agent_func")
    found = getattr(module, "AgentExecutor", None)
    if not inspect.isclass(found):
        own = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
        names = ", ".join(own) or "none"
        raise UnusableFile(f"the file has no class AgentExecutor (its classes: {names}).\n{FORM}")
    if problem := _unusable(found):
        raise UnusableFile(f"{problem}.\n{FORM}")
    return found


def _unusable(executor: type) -> str:
    """Why; "" where it can be made and called."""
    if not issubclass(executor, AgentExecutorBase):
        return "AgentExecutor is no subclass of openrlhf.utils.agent.AgentExecutorBase"
    if inspect.isabstract(executor):
        return f"AgentExecutor does not define {', '.join(sorted(executor.__abstractmethods__))}"
    try:
        inspect.signature(executor).bind()
    except TypeError as error:
        return f"AgentExecutor{inspect.signature(executor)} cannot be made without arguments: {error}"
    signature = inspect.signature(executor.execute)
    try:
        signature.bind(None, **dict.fromkeys(_accepted(executor.execute)))
    except TypeError as error:
        return f"execute{signature} cannot be called by the names of its parameters: {error}"
    return ""


PARAMETERS = tuple(inspect.signature(AgentExecutorBase.execute).parameters)[1:]


def _accepted(execute: Callable) -> tuple[str, ...]:
    """What of PARAMETERS it can be called with, by name."""
    parameters = inspect.signature(execute).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return PARAMETERS
    return tuple(name for name in PARAMETERS if name in parameters)


class UserExecutor(AgentExecutorBase):
    """The executor of a user's file. What it raises is EnvironmentFailed; RewardError stays what it is."""

    def __init__(self, path: str, executor: AgentExecutorBase) -> None:
        self.path, self.executor, self.source = path, executor, f"{path}: execute"
        self._accepted = _accepted(executor.execute)

    @classmethod
    async def load(cls, path: str, deadline: float = IMPORT_DEADLINE) -> "UserExecutor":
        """Import the file into this process, and make its executor. ImportTimeout after `deadline` seconds;
        RuntimeError, which names the line, for what is raised."""
        path = str(Path(path).resolve())
        try:
            async with asyncio.timeout(deadline):
                executor_class = await asyncio.to_thread(load_executor_class, path)
        except TimeoutError:
            raise ImportTimeout(path, deadline) from None
        except Exception as error:
            raise RuntimeError(import_problem(error, path)) from error
        try:
            return cls(path, executor_class())
        except Exception as error:
            raise RuntimeError(located(error, path)) from error

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: "SamplingParams",
        max_length: int,
        hf_tokenizer: "PreTrainedTokenizerBase",
        llm_engine: Engine,
        images: Any = None,
    ) -> dict:
        given: dict[str, Any] = {
            "prompt": prompt,
            "label": label,
            "sampling_params": sampling_params,
            "max_length": max_length,
            "hf_tokenizer": hf_tokenizer,
            "llm_engine": llm_engine,
            "images": images,
        }
        try:
            return await self.executor.execute(**{name: given[name] for name in self._accepted})
        except RewardError:
            raise
        except Exception as error:
            trace = "".join(traceback.format_exception(error, limit=-3)).rstrip()
            raise EnvironmentFailed(f"{located(error, self.path)}\n{trace}") from error
