"""Loads users' executors, and calls them with the arguments that they accept."""

import asyncio
import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from openrlhf.agents.base import (
    AgentExecutorBase,
    MultiTurnAgentExecutor,
    RewardError,
    StepTimeout,
    unproxied,
)
from openrlhf.agents.chat_stream import TemplateProblem, probe
from openrlhf.errors import ErrorCode, RunError, print_all_characters
from openrlhf.plugins import entry_points
from openrlhf.rewards.function import IMPORT_LIMIT, check_file
from openrlhf.rollout.legacy_agents import QueueExecutor, accepted, is_queue_executor, step_environment
from openrlhf.user_file import (
    IMPORT_DEADLINE,
    ImportTimeout,
    UnusableFile,
    import_place,
    import_problem,
    imports,
    located,
    resolved,
    split,
)

if TYPE_CHECKING:  # imports that take seconds, and that the check of a file does not need
    from transformers import PreTrainedTokenizerBase

FORM = (
    "Define `class {}(AgentExecutorBase)` with\n`async def execute(self, prompt, label, "
    "sampling_params, max_length, hf_tokenizer, llm_engine)`, which returns a dict."
)


ADAPTERS = "openrlhf.attached.agent_file"
"""Entry points of functions that make the agent files of another library loadable, by the name of the package
that such files import. Each returns a function from a file's class, `AgentRunner`, to that of an executor."""


class EnvironmentFailed(Exception):
    """Raised if a user's executor raises an error or returns an unusable result. The message names its
    file."""


def check_agent_file(
    reference: str,
    flag: str,
    limits: Sequence[str] = (),
    limit: float = IMPORT_LIMIT,
    tokenizer: "Callable[[], PreTrainedTokenizerBase] | None" = None,
    is_chat: bool = False,
) -> str:
    """Checks an agent's class with `rewards.function.check_file`, without creating an instance. `limits`: the
    names in LIMITS whose flags are set. `tokenizer`: loads the policy's tokenizer, for executors that need
    its chat template. `is_chat`: True if the chat template is already applied to prompts."""
    load = partial(load_agent, limits=tuple(limits), tokenizer=tokenizer, is_chat=is_chat)
    return check_file(reference, flag, load, limit)


@dataclass(frozen=True, kw_only=True)
class AgentSetting:
    """Settings of an executor. Executors of OpenRLHF 0.8 receive them when they are created, others in every
    call."""

    tokenizer: Any = None
    max_length: int = 0
    max_turns: int | None = None
    step_timeout: float | None = None


def load_agent(
    reference: str,
    limits: Sequence[str] = (),
    tokenizer: "Callable[[], PreTrainedTokenizerBase] | None" = None,
    is_chat: bool = False,
) -> Callable[[AgentSetting], AgentExecutorBase]:
    """Imports the class that `reference` names (by default `AgentExecutor`), and returns a function that
    creates an executor of this class.

    Raises UnusableFile if the class is missing, cannot be created or called, or would ignore one of `limits`.
    Errors of the import are passed on.
    """
    place, given = split(reference)
    name = given or "AgentExecutor"
    form = FORM.format(name)
    adapters = [point.load()() for point in entry_points(ADAPTERS) if imports(place, point.name)]
    module = import_place(place, "agent_func")
    found = getattr(module, name, None if given else getattr(module, "AgentRunner", None))
    for adapt in adapters:
        found = adapt(found)
    if not inspect.isclass(found):
        if not given and callable(getattr(module, "step", None)):
            return lambda setting: MultiTurnAgentExecutor(step_environment(place))
        own = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
        kind = "file" if place.endswith(".py") else "module"
        names = ", ".join(own) or "none"
        raise UnusableFile(f"the {kind} has no class {name} (its classes: {names}).\n{form}")
    if not issubclass(found, AgentExecutorBase):
        problem = f"{name} is no subclass of openrlhf.agents.base.AgentExecutorBase"
        raise UnusableFile(f"{problem}.\n{form}")
    if is_queue_executor(found):
        if "images" in limits:
            raise UnusableFile(
                f"{LIMITS['images']} is set, and executors of OpenRLHF 0.8, which get a queue when they are "
                f"created, do not support images.\n{form}"
            )
        return lambda setting: QueueExecutor(
            found,
            max_steps=setting.max_turns,
            max_length=setting.max_length,
            tokenizer=setting.tokenizer,
        )
    if problem := _find_problem(found) or _ignored_limit(found, limits):
        raise UnusableFile(f"{problem}.\n{form}")
    if tokenizer is not None and found.writes_messages:
        _check_template(tokenizer(), is_chat, with_tools=found.calls_tools)
    return lambda setting: found()


def _check_template(tokenizer: "PreTrainedTokenizerBase", is_chat: bool, *, with_tools: bool) -> None:
    if is_chat:
        raise UnusableFile(
            "--data.apply_chat_template applies the chat template to prompts, and the agent applies it to "
            "its messages: the policy would read it twice. Leave the flag out"
        )
    try:
        probe(tokenizer, with_tools=with_tools)
    except TemplateProblem as error:
        raise UnusableFile(f"the policy's chat template does not fit multi-turn agents: {error}") from error


def _find_problem(executor: type[AgentExecutorBase]) -> str:
    """Returns the reason why the class cannot be created or called; "" if it can."""
    if executor.execute is AgentExecutorBase.execute:
        return f"{executor.__name__} does not define execute"
    if inspect.isabstract(executor):
        missing = ", ".join(sorted(getattr(executor, "__abstractmethods__")))  # noqa: B009
        return f"{executor.__name__} does not define {missing}"
    try:
        inspect.signature(executor).bind()
    except TypeError as error:
        return (
            f"{executor.__name__}{inspect.signature(executor)} cannot be created without arguments: {error}"
        )
    signature = inspect.signature(executor.execute)
    try:
        signature.bind(None, **dict.fromkeys(accepted(executor.execute, PARAMETERS)))
    except TypeError as error:
        return f"execute{signature} cannot be called with keyword arguments: {error}"
    return ""


def _ignored_limit(executor: type[AgentExecutorBase], limits: Sequence[str]) -> str:
    """Returns a message about the first of `limits` that the executor would ignore; "" if it accepts all."""
    for name in limits:
        if not accepted(executor.execute, (name,)):
            return (
                f"{LIMITS[name]} is set, and execute has no parameter {name}: add the parameter and observe "
                "it, or leave the flag out"
            )
    return ""


LIMITS = {
    "max_turns": "--train.max_turns",
    "step_timeout": "--rollout.step_timeout",
    "images": "--data.max_images_per_prompt",
}
PARAMETERS = (*("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine"), *LIMITS)


class UserExecutor(AgentExecutorBase):
    """Wraps a user's executor. Converts its errors to EnvironmentFailed, except RewardError and
    StepTimeout."""

    def __init__(self, reference: str, executor: AgentExecutorBase, setting: AgentSetting) -> None:
        super().__init__()
        self.reference, self.source = reference, f"{reference}: execute"
        self.executor, self.setting = executor, setting
        self._accepted = accepted(executor.execute, PARAMETERS)

    @classmethod
    async def load(
        cls, reference: str, setting: AgentSetting | None = None, deadline: float = IMPORT_DEADLINE
    ) -> "UserExecutor":
        """Imports the file or module into this process and creates its executor, whose clients reach this
        machine without a proxy. Raises ImportTimeout after `deadline` seconds, and RunError with the line
        number for any other error."""
        print_all_characters()
        os.environ.update(unproxied())
        reference = resolved(reference)
        try:
            async with asyncio.timeout(deadline):
                make = await asyncio.to_thread(load_agent, reference)
        except TimeoutError:
            raise ImportTimeout(reference, deadline) from None
        except Exception as error:
            raise RunError(ErrorCode.USER_CODE, import_problem(error, reference)) from error
        try:
            setting = setting or AgentSetting()
            executor = make(setting)
            if setting.tokenizer is not None:
                executor.check_tokenizer(setting.tokenizer)
            return cls(reference, executor, setting)
        except Exception as error:
            raise RunError(ErrorCode.USER_CODE, located(error, reference)) from error

    async def execute(self, *args: Any, images: Any = None) -> Any:
        """`args`: the first of PARAMETERS, in order."""
        limits = {"max_turns": self.setting.max_turns, "step_timeout": self.setting.step_timeout}
        given: dict[str, Any] = dict(zip(PARAMETERS, args, strict=False)) | limits | {"images": images}
        try:
            return await self.executor.execute(**{name: given[name] for name in self._accepted})
        except (RewardError, StepTimeout):
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the run cancels the episode
            trace = "".join(traceback.format_exception(error, limit=-3)).rstrip()
            raise EnvironmentFailed(f"{located(error, self.reference)}\n{trace}") from error
