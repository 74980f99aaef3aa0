"""The agent contract: what users' own files import, and the default agent.

An executor turns a prompt into an episode. It is given an engine that remembers every request, asks it for
tokens, and says what the episode is worth.
"""

import asyncio
import contextvars
import copy
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.completions import Completions, SamplingParams
from openrlhf.text import (
    decode,
    image_data,
    num_tokens_read,
    prompt_token_ids,
    text_tokenizer,
    token_ids_within,
    with_placeholders,
)

if TYPE_CHECKING:  # users' files are checked without what takes seconds
    from PIL.Image import Image as Picture
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    reward: float
    score: float
    """What filtering and evaluation look at; the reward where the function gives no score of its own."""
    extra_logs: dict[str, float] = field(default_factory=dict)


class RewardError(Exception):
    """A reward could not be computed. The episode is counted as failed and is not trained on."""


class Engine(Protocol):
    """Token in, token out."""

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        multi_modal_data: dict | None = None,
    ) -> Completions:
        """One request."""
        ...


class AgentExecutorBase:
    """One object for each engine process. `execute` runs for many samples at a time, so it keeps no state of
    one."""

    writes_messages = False
    """Prompts become messages, which the policy reads by its chat template: that is tried before a run."""
    calls_tools = False
    """Messages may have calls of tools, and their results."""

    def __init__(
        self,
        agent_instance_cls: Any = None,
        max_steps: int | None = None,
        max_length: int = 0,
        llm_engine: Any = None,
        hf_tokenizer: Any = None,
        result_queue: Any = None,
    ) -> None:
        """Without arguments. Executors of OpenRLHF 0.8.5 to 0.8.10 hand them over
        (rollout/legacy_agents.py)."""
        self.agent_instance_cls, self.max_steps, self.max_length = agent_instance_cls, max_steps, max_length
        self.llm_engine, self.hf_tokenizer, self.result_queue = llm_engine, hf_tokenizer, result_queue

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Called once, before the first episode: to raise where the executor cannot work with the policy's
        tokenizer."""
        return

    async def execute(
        self, prompt: str, label: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> Any:
        """One episode. To be defined as `execute(self, prompt, label, sampling_params, max_length,
        hf_tokenizer, llm_engine, images=None)`; what it has no parameter for, it is not handed.

        `images`: those of the prompt, as PIL images; None where it has none. For a policy that reads images
        `hf_tokenizer` is its processor, and they go to the engine beside the tokens, in which each has one
        placeholder: `generate(prompt_token_ids, sampling_params, {"image": images})`.

        `await llm_engine.generate(prompt_token_ids, sampling_params)` returns Completions, which have the
        names of vLLM's RequestOutput, as often as it is asked; `sampling_params` is this episode's own, and
        docs/agents.md says what of it may be changed. `max_length` bounds a sequence, prompt and actions
        together. `max_turns` and `step_timeout`, where it has such parameters, are those of the flags
        --train.max_turns and --rollout.step_timeout.

        Returns a dictionary:
            reward: a number. None: where reward models give it.
            scores: what filtering and evaluation look at. Missing or None: the reward.
            extra_logs: numbers by name, which become metrics.
            turn_rewards: a number for each request, in order: when the reward was earned. What they do not
                add up to is earned at the end.
            observation_tokens, action_ranges: the whole sequence, and the [start, end) in it that are trained
                on. Without them every request is, and requests that go on where another ended are one
                sequence.
            truncated: the episode had to end. Missing: whether the last answer ran out of tokens.

        Log-probs, versions of the weights and seeds are known from the requests: other keys are not read.
        """
        if self.agent_instance_cls is None:
            raise NotImplementedError(f"{type(self).__name__} does not define execute")
        result = await MultiTurnAgentExecutor(self.agent_instance_cls).execute(
            prompt,
            label,
            sampling_params,
            self.max_length,
            self.hf_tokenizer,
            self.llm_engine,
            max_turns=self.max_steps,
        )
        await self.result_queue.put(result)


class AgentInstanceBase(ABC):
    """The environment of one episode, made without arguments. `__init__` may be `async`."""

    async def reset(self, states: dict, **kwargs: Any) -> dict:
        """`states`: `observation`, which is the prompt, and `label`. Returns the `observation` that the
        policy reads first."""
        return states

    @abstractmethod
    async def step(self, states: dict, **kwargs: Any) -> dict:
        """After each answer. `states`: `observation_text`, everything before it; `action_text`, the answer,
        special tokens kept; `label`; `sampling_params`.

        Returns a dictionary:
            rewards: a number, or a tensor of one, for this turn. The episode's reward is their sum.
            environment_feedback: text that the policy reads next. Nothing of it is trained on.
            observation: instead of feedback, everything that the policy reads next. A rewritten history
                begins a new sequence, which shares the reward.
            environment_images: for a policy that reads images, those of the feedback, or of what an
                observation adds to the history: PIL images, bytes of their files or data: URIs, one for each
                `<image>` in the text. Where the text has none, they stand in front of it.
            done: the episode ends.
            scores: what filtering and evaluation look at; that of the last turn that has one. Missing: the
                reward.
            sampling_params: of the turns that follow. Missing or None: as before.
            extra_logs: numbers by name; the last of each name counts.
        """


class StepTimeout(Exception):
    """A call of the environment took longer than --rollout.step_timeout."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """A policy and an environment take turns in one stream of tokens: what was sampled is never tokenised
    again, feedback stands behind it."""

    def __init__(self, agent_instance_cls: type) -> None:
        """A subclass of AgentInstanceBase."""
        if not callable(getattr(agent_instance_cls, "step", None)):
            raise TypeError(
                f"{agent_instance_cls!r} is no subclass of openrlhf.agents.base.AgentInstanceBase"
            )
        super().__init__(agent_instance_cls)

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: "PreTrainedTokenizerBase",
        llm_engine: Engine,
        images: Any = None,
        *,
        max_turns: int | None = None,
        step_timeout: float | None = None,
    ) -> dict:
        """An answer has at most `sampling_params.max_tokens` tokens, the sequence at most `max_length`. The
        episode is truncated where one of them or `max_turns` ends it, and not its environment."""
        call = partial(call_in_time, seconds=step_timeout)
        environment = await _make(self.agent_instance_cls)
        first = await call(environment.reset, {"observation": prompt, "label": label})
        history = History(hf_tokenizer, _get(first, "observation", "reset"), max_length, images or ())
        if history.length >= max_length:
            room = f"no room in --data.max_len {max_length}"
            raise ValueError(f"an observation of {history.length} tokens leaves {room}")
        steps: list[dict] = []
        limit = sampling_params.max_tokens
        while True:
            room = max_length - history.length
            if room < 1 or len(steps) == max_turns:
                return _result(steps, truncated=True)
            params = copy.copy(sampling_params)
            params.max_tokens = asked = min(room, limit or room)
            data = image_data(history.images)
            answer = (await llm_engine.generate(history.token_ids, params, data)).outputs[0]
            if answer.finish_reason == "abort":
                return {"reward": None}
            states = {"observation_text": history.text, "action_text": history.act(answer.token_ids)}
            step = await call(environment.step, states | {"label": label, "sampling_params": params})
            steps.append(step)
            if _get(step, "done", "step"):
                return _result(steps, truncated=answer.finish_reason == "length")
            history.read(step)
            sampling_params = step.get("sampling_params") or sampling_params
            if sampling_params.max_tokens != asked:  # else these are the ones that the step was handed
                limit = sampling_params.max_tokens


class History:
    """What the policy has read: as text for the environment, as tokens and images for the engine. Where it is
    longer than `max_length`, which ends the episode, not all tokens need be there."""

    def __init__(self, tokenizer: Any, text: str, max_length: int, images: Sequence["Picture"] = ()) -> None:
        """`tokenizer`: or a processor. `images`: in the order of their placeholders in `text`."""
        self.processor, self.tokenizer = tokenizer, text_tokenizer(tokenizer)
        self.max_length = max_length
        self.text, self.token_ids, self.images = "", [], []
        self.add(text, images)

    @property
    def length(self) -> int:
        """Tokens that the policy has read."""
        return num_tokens_read(self.processor, self.token_ids, self.images)

    def add(self, text: str, images: Sequence["Picture"] = ()) -> None:
        self.images = [*self.images, *images]
        self.text += text
        self.token_ids = [*self.token_ids, *token_ids_within(self.tokenizer, text, self.max_length)]

    def act(self, token_ids: Sequence[int]) -> str:
        """The answer as text."""
        text = decode(self.tokenizer, token_ids, after=self.token_ids)
        self.text += text
        self.token_ids = [*self.token_ids, *token_ids]
        return text

    def read(self, step: dict) -> None:
        """What the environment says to it."""
        shown = step.get("environment_images") or ()
        if len(shown) and self.processor is self.tokenizer:
            raise ValueError(
                "environment_images: the policy reads no images; set --data.max_images_per_prompt, or leave "
                "them out"
            )
        images = [_picture(value) for value in shown]
        if (whole := step.get("observation")) is None:
            new = _get(step, "environment_feedback", "step")
        elif whole.startswith(self.text):
            new = whole[len(self.text) :]
        else:
            new, self.text, self.token_ids, self.images = whole, "", [], []
        self.add(with_placeholders(self.processor, new, len(images)) if images else new, images)


def _picture(value: Any) -> "Picture":
    from openrlhf.data.images import ImageSources, load_image  # most environments show none
    from openrlhf.data.pictures import decoded

    return decoded(load_image(value, ImageSources()).data)


def _result(steps: Sequence[dict], *, truncated: bool) -> dict:
    """What `execute` returns."""
    rewards = [float(_get(step, "rewards", "step")) for step in steps]
    scores = [step["scores"] for step in steps if step.get("scores") is not None]
    logs = [step.get("extra_logs") or {} for step in steps]
    return {
        "reward": sum(rewards),
        "scores": scores[-1] if scores else None,
        "extra_logs": {name: value for of_turn in logs for name, value in of_turn.items()},
        "turn_rewards": rewards,
        "truncated": truncated,
    }


def _get(result: Any, key: str, method: str) -> Any:
    if not isinstance(result, dict):
        raise TypeError(f"{method} returned {type(result).__name__}, not a dict")
    if key not in result:
        found = ", ".join(map(repr, result)) or "nothing"
        raise KeyError(f"{method} returned a dict without {key!r}; it has {found}")
    return result[key]


async def _make(agent_class: Any) -> Any:
    """An object whose `__init__` may be async."""
    agent = agent_class.__new__(agent_class)
    if inspect.isawaitable(waits := agent.__init__()):
        await waits
    return agent


async def call_in_time(method: Callable, *arguments: Any, seconds: float | None, **options: Any) -> Any:
    """`method(*arguments, **options)`; in a thread where it is no coroutine. StepTimeout after `seconds`."""
    return await within(seconds, called(partial(method, *arguments, **options)), method.__name__)


async def within(seconds: float | None, work: Awaitable[Any], name: str) -> Any:
    """StepTimeout where it takes longer."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise StepTimeout(f"{name} took longer than --rollout.step_timeout {seconds:g} s") from None


async def called(function: Callable[[], Any]) -> Any:
    """What it returns, of users' functions that may be `async`; in a thread where it is not."""
    if inspect.iscoroutinefunction(function):
        return await function()
    answer = await in_thread(function)
    return await answer if inspect.isawaitable(answer) else answer  # a decorator may hide that it is


async def in_thread(function: Callable, *arguments: Any) -> Any:
    """As asyncio.to_thread, in a thread of its own: as many as there are calls, and one that never ends keeps
    neither others nor the end of the process waiting."""
    future: Future[Any] = Future()

    def run(context: contextvars.Context) -> None:
        try:
            future.set_result(context.run(function, *arguments))
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()  # who gives it up leaves the thread alone
    threading.Thread(target=run, args=[contextvars.copy_context()], daemon=True).start()
    return await asyncio.wrap_future(future)


_PROMPTS = 64
"""Whose tokens are kept: the samples of a prompt ask for them one soon after the other."""


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One generation, then one call of the reward."""

    def __init__(self, reward: Callable[[str, str, Any], Awaitable[Reward]], *, is_chat: bool) -> None:
        """`reward(query, prompt, label)`: query is the prompt and the response as text, special tokens
        kept. `is_chat`: prompts are written by a chat template."""
        self.reward = reward
        self._prompt_ids = lru_cache(_PROMPTS)(partial(prompt_token_ids, is_chat=is_chat))

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: "PreTrainedTokenizerBase",
        llm_engine: Engine,
        images: Any = None,
    ) -> dict:
        tokenizer = text_tokenizer(hf_tokenizer)
        prompt_ids = list(self._prompt_ids(tokenizer, prompt))
        length = num_tokens_read(hf_tokenizer, prompt_ids, images or ())
        room = max_length - length
        if room < 1:
            raise ValueError(f"a prompt of {length} tokens leaves no room in --data.max_len {max_length}")
        sampling_params.max_tokens = min(room, sampling_params.max_tokens or room)
        output = (await llm_engine.generate(prompt_ids, sampling_params, image_data(images))).outputs[0]
        if output.finish_reason == "abort":
            return {"reward": None}
        response = decode(tokenizer, output.token_ids, after=prompt_ids)
        reward = await self.reward(prompt + response, prompt, label)
        return {"reward": reward.reward, "scores": reward.score, "extra_logs": reward.extra_logs}
