"""The agent contract: what users' own files import, and the default agent.

An executor turns a prompt into an episode: it requests tokens from an engine, which records every request,
and returns the episode's reward.
"""

import asyncio
import contextvars
import copy
import inspect
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.completions import Completions, SamplingParams
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.text import (
    decode,
    image_data,
    num_tokens_read,
    prompt_token_ids,
    text_tokenizer,
    token_ids_within,
    with_placeholders,
)

if TYPE_CHECKING:  # these imports take seconds, which checking a user's file does not need
    from PIL.Image import Image as Picture
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    reward: float
    score: float
    """Score that filtering and evaluation read; equals `reward` if the function returns no score."""
    extra_logs: dict[str, float] = field(default_factory=dict)
    extra_texts: dict[str, str] = field(default_factory=dict)


class RewardError(Exception):
    """Raised when a reward cannot be computed. The episode counts as failed and is not trained on."""


class Engine(Protocol):
    """A rollout engine as agents see it: token ids in, token ids out."""

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        multi_modal_data: dict | None = None,
    ) -> Completions:
        """Returns the completions of one request, `sampling_params.n` of them."""
        ...


class AgentExecutorBase:
    """Base class of agents. Each engine process has one instance, whose `execute` runs concurrently for many
    samples, so instances keep no state of a single sample."""

    writes_messages = False
    """True if prompts become chat messages; the chat template is then probed before a run."""
    calls_tools = False
    """True if messages may contain tool calls and their results."""

    def __init__(
        self,
        agent_instance_cls: Any = None,
        max_steps: int | None = None,
        max_length: int = 0,
        llm_engine: Any = None,
        hf_tokenizer: Any = None,
        result_queue: Any = None,
    ) -> None:
        """Takes no arguments in new code. Executors written for OpenRLHF 0.8.5 to 0.8.10 pass them
        (rollout/legacy_agents.py)."""
        self.agent_instance_cls, self.max_steps, self.max_length = agent_instance_cls, max_steps, max_length
        self.llm_engine, self.hf_tokenizer, self.result_queue = llm_engine, hf_tokenizer, result_queue

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Checks the policy's tokenizer once, before the first episode. Overrides raise if the executor
        cannot work with it."""
        return

    async def execute(
        self, prompt: str, label: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs one episode. Subclasses define it as `execute(self, prompt, label, sampling_params,
        max_length, hf_tokenizer, llm_engine, images=None)`; arguments that the definition has no parameter
        for are not passed.

        `images`: the prompt's PIL images; None without images. For a policy that reads images, `hf_tokenizer`
        is its processor, and the images go to the engine beside the tokens, which contain one placeholder per
        image: `generate(prompt_token_ids, sampling_params, {"image": images})`.

        `await llm_engine.generate(prompt_token_ids, sampling_params)` returns Completions, whose attributes
        are named as in vLLM's RequestOutput; an episode may call it any number of times. `sampling_params` is
        this episode's own copy; docs/agents.md lists the fields that may be changed. `max_length` bounds the
        tokens of a sequence, prompt and actions together. The optional parameters `max_turns` and
        `step_timeout` receive the values of --train.max_turns and --rollout.step_timeout.

        Returns a dictionary:
            reward: a number. None if reward models give it.
            scores: the score that filtering and evaluation read. Missing or None: the reward.
            extra_logs: numbers by name, which become metrics.
            extra_texts: texts by name, such as a judge's answer, which are recorded.
            turn_rewards: the reward of each request, in order. The difference between `reward` and their sum
                counts at the end.
            observation_tokens, action_ranges: the whole sequence, and the ranges [start, end) in it that are
                trained on. If missing, every request is trained on, and a request that continues an earlier
                one extends its sequence.
            truncated: whether a limit ended the episode. Missing: whether the last answer ran out of tokens.

        Other keys are ignored: log-probs, weight versions and seeds are recorded with the requests.
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
    """The environment of one episode, constructed without arguments. `__init__` may be `async`."""

    async def reset(self, states: dict, **kwargs: Any) -> dict:
        """Begins the episode. `states` has `observation` (the prompt) and `label`. Returns a dictionary whose
        `observation` is the first text that the policy reads."""
        return states

    @abstractmethod
    async def step(self, states: dict, **kwargs: Any) -> dict:
        """Responds to an answer of the policy. `states` has `observation_text`, all text before the answer;
        `action_text`, the answer with special tokens; `label`; and `sampling_params`.

        Returns a dictionary:
            rewards: this turn's reward, a number or a one-element tensor. The episode's reward is the sum
                over turns.
            environment_feedback: text that the policy reads next. It is not trained on.
            observation: replaces feedback by everything that the policy reads next. A rewritten history
                begins a new sequence, which shares the reward.
            environment_images: images of the feedback, or of the text that an observation adds to the
                history, for a policy that reads images: PIL images, bytes of image files or data: URIs, one
                for each `<image>` in the text. If the text has no `<image>`, they are placed in front of it.
            done: whether the episode ends.
            truncated: whether a limit of the environment ends the episode. Missing or None: whether the last
                answer ran out of tokens.
            scores: the score that filtering and evaluation read; the last turn with a score counts. Missing:
                the reward.
            sampling_params: for the following turns. Missing or None: unchanged.
            extra_logs, extra_texts: numbers, and texts, by name; the last value of each name counts.
        """

    async def close(self) -> None:
        """Ends the episode, also one that failed or reached a limit."""
        return


def unproxied() -> dict[str, str]:
    """Returns NO_PROXY with the names of this machine, which clients then reach without the proxy of the
    environment: agents ask servers here."""
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    hosts = dict.fromkeys([*known.split(","), "127.0.0.1", "localhost"])
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(host for host in hosts if host))


class StepTimeout(Exception):
    """Raised when a call of the environment takes longer than --rollout.step_timeout."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Alternates policy and environment in one token stream: sampled tokens are never retokenized, and
    feedback is appended to them."""

    def __init__(self, agent_instance_cls: type) -> None:
        """`agent_instance_cls`: a subclass of AgentInstanceBase. Raises TypeError for a class without
        `step`."""
        if not callable(getattr(agent_instance_cls, "step", None)):
            raise TypeError(
                f"{agent_instance_cls!r} is not a subclass of openrlhf.agents.base.AgentInstanceBase"
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
        """Runs one episode. An answer has at most `sampling_params.max_tokens` tokens, the sequence at most
        `max_length`. The episode is truncated if one of these limits or `max_turns` ends it instead of the
        environment. Raises UsageError if the first observation fills `max_length`."""
        call = partial(call_in_time, seconds=step_timeout)
        environment = await _make(self.agent_instance_cls)
        try:
            first = await call(environment.reset, {"observation": prompt, "label": label})
            text = _get(first, "observation", "reset", str)
            history = History(hf_tokenizer, text, max_length, images or ())
            if history.length >= max_length:
                raise _no_room(f"an observation of {history.length} tokens", max_length)
            take_step = partial(call, environment.step)
            return await self._play(take_step, history, label, sampling_params, llm_engine, max_turns)
        finally:
            if callable(close := getattr(environment, "close", None)):
                await call(close)

    async def _play(
        self,
        take_step: Callable[[dict], Awaitable[Any]],
        history: "History",
        label: Any,
        sampling_params: SamplingParams,
        llm_engine: Engine,
        max_turns: int | None,
    ) -> dict:
        """Plays the turns of an episode, which begins with `history`."""
        steps: list[dict] = []
        limit = sampling_params.max_tokens
        while True:
            room = history.max_length - history.length
            if room < 1 or len(steps) == max_turns:
                return _result(steps, truncated=True)
            params = copy.copy(sampling_params)
            params.max_tokens = asked = min(room, limit or room)
            data = image_data(history.images)
            answer = (await llm_engine.generate(history.token_ids, params, data)).outputs[0]
            if answer.finish_reason == "abort":
                return {"reward": None}
            states = {"observation_text": history.text, "action_text": history.act(answer.token_ids)}
            step = await take_step(states | {"label": label, "sampling_params": params})
            done, cut = _flag(_get(step, "done", "step"), "done"), _flag(step.get("truncated"), "truncated")
            # a copy, because environments may fill the same dictionary in each turn
            steps.append(step | {"rewards": _get(step, "rewards", "step", float)})
            if done or cut:
                return _result(
                    steps, truncated=answer.finish_reason == "length" if cut is None else bool(cut)
                )
            history.read(step)
            sampling_params = SamplingParams.of(step.get("sampling_params") or sampling_params)
            if sampling_params.max_tokens != asked:  # equal: the step returned the params that it received
                limit = sampling_params.max_tokens


def _no_room(what: str, max_length: int) -> UsageError:
    return UsageError(
        ErrorCode.TOO_LONG, f"{what} leaves no room for an answer", flag="--data.max_len", value=max_length
    )


class History:
    """The context of the policy: text for the environment, tokens and images for the engine. Tokens beyond
    `max_length` may be missing; such a history ends the episode."""

    def __init__(self, tokenizer: Any, text: str, max_length: int, images: Sequence["Picture"] = ()) -> None:
        """`tokenizer`: a tokenizer or a processor. `images`: in the order of their placeholders in `text`."""
        self.processor, self.tokenizer = tokenizer, text_tokenizer(tokenizer)
        self.max_length = max_length
        self.text, self.token_ids, self.images = "", [], []
        self.add(text, images)

    @property
    def length(self) -> int:
        """Number of tokens that the policy has read, images included."""
        return num_tokens_read(self.processor, self.token_ids, self.images)

    def add(self, text: str, images: Sequence["Picture"] = ()) -> None:
        self.images = [*self.images, *images]
        self.text += text
        self.token_ids = [*self.token_ids, *token_ids_within(self.tokenizer, text, self.max_length)]

    def act(self, token_ids: Sequence[int]) -> str:
        """Appends an answer and returns its text."""
        text = decode(self.tokenizer, token_ids, after=self.token_ids)
        self.text += text
        self.token_ids = [*self.token_ids, *token_ids]
        return text

    def read(self, step: dict) -> None:
        """Appends the feedback or observation of an environment step. Raises ValueError for images if the
        policy reads none."""
        shown = step.get("environment_images") or ()
        if len(shown) and self.processor is self.tokenizer:
            raise ValueError(
                "environment_images: the policy reads no images; set --data.max_images_per_prompt, or leave "
                "them out"
            )
        images = [_picture(value) for value in shown]
        if (whole := step.get("observation")) is None:
            new = _get(step, "environment_feedback", "step", str)
        elif (whole := _get(step, "observation", "step", str)).startswith(self.text):
            new = whole[len(self.text) :]
        else:
            new, self.text, self.token_ids, self.images = whole, "", [], []
        self.add(with_placeholders(self.processor, new, len(images)) if images else new, images)


def _picture(value: Any) -> "Picture":
    from openrlhf.data import images, pictures  # late: takes seconds, and most environments have no images

    return pictures.decoded(images.load_image(value, images.ImageSources()).data)


def _result(steps: Sequence[dict], *, truncated: bool) -> dict:
    """Returns the result of an episode from its environment steps."""
    rewards = [step["rewards"] for step in steps]
    scores = [step["scores"] for step in steps if step.get("scores") is not None]
    return {
        "reward": sum(rewards),
        "scores": scores[-1] if scores else None,
        **{key: _last_of_each(steps, key) for key in ("extra_logs", "extra_texts")},
        "turn_rewards": rewards,
        "truncated": truncated,
    }


def _last_of_each(steps: Sequence[dict], key: str) -> dict:
    """Merges the dictionaries of the steps under `key`."""
    found = [_get(step, key, "step", dict) for step in steps if step.get(key) is not None]
    return {name: value for own in found for name, value in own.items()}


def _get(result: Any, key: str, method: str, kind: type | None = None) -> Any:
    """Returns `result[key]`, a float for that `kind`. Raises KeyError or TypeError, which name the key."""
    if not isinstance(result, dict):
        raise TypeError(f"{method} returned {type(result).__name__}, not a dict")
    if key not in result:
        found = ", ".join(map(repr, result)) or "nothing"
        raise KeyError(f"{method} returned a dict without {key!r}; it has {found}")
    try:
        value = float(result[key]) if kind is float else result[key]
    except (TypeError, ValueError):
        value = None
    if kind and not isinstance(value, kind):
        raise TypeError(f"{method} returned {key} {result[key]!r}, not a {kind.__name__}")
    if isinstance(value, str) and value != (shown := value.encode(errors="replace").decode()):
        text = f"{method} returned {key} with a half of a character, shown as ?: {shown[:80]!r}"
        raise ValueError(f"{text}. Decode bytes with errors='replace'")
    return value


def _flag(value: Any, key: str) -> Any:
    """Returns the value of a step that is true or false. Raises TypeError for text: "False" would be true."""
    if isinstance(value, str):
        raise TypeError(f"step returned {key} {value!r}, not a bool")
    return value


async def _make(agent_class: Any) -> Any:
    """Constructs an object whose `__init__` may be async."""
    agent = agent_class.__new__(agent_class)
    if inspect.isawaitable(waits := agent.__init__()):
        await waits
    return agent


async def call_in_time(method: Callable, *arguments: Any, seconds: float | None, **options: Any) -> Any:
    """Returns `method(*arguments, **options)`, run in a thread if it is not a coroutine function. Raises
    StepTimeout after `seconds`."""
    return await within(seconds, called(partial(method, *arguments, **options)), method.__name__)


async def within(seconds: float | None, work: Awaitable[Any], name: str) -> Any:
    """Awaits `work`, which `name` names in errors. Raises StepTimeout after `seconds`; None: no limit."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise StepTimeout(f"{name} took longer than --rollout.step_timeout {seconds:g} s") from None


async def called(function: Callable[[], Any]) -> Any:
    """Calls a user's function, which may be `async`, and returns its result. Other functions run in a
    thread. An exit, which would end the process, is raised as RuntimeError."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function()
        answer = await in_thread(function)
        return await answer if inspect.isawaitable(answer) else answer  # a decorator may hide a coroutine
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}").with_traceback(error.__traceback__) from error


async def in_thread(function: Callable, *arguments: Any) -> Any:
    """Runs a function like asyncio.to_thread, but in a new daemon thread per call: a call that never ends
    blocks neither other calls nor the exit of the process."""
    future: Future[Any] = Future()

    def run(context: contextvars.Context) -> None:
        try:
            future.set_result(context.run(function, *arguments))
        except StopIteration as error:  # no awaited future takes it: the caller would wait for ever
            future.set_exception(RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__))
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()  # cancelling the await does not stop the thread
    threading.Thread(target=run, args=[contextvars.copy_context()], daemon=True).start()
    return await asyncio.wrap_future(future)


_PROMPTS = 64
"""Number of prompts whose token ids are cached; the samples of a prompt request them in quick succession."""


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Generates one answer and calls the reward function once."""

    def __init__(self, reward: Callable[[str, str, Any], Awaitable[Reward]], *, is_chat: bool) -> None:
        """`reward(query, prompt, label)`: `query` is prompt plus response as text, with special tokens.
        `is_chat`: prompts are rendered by a chat template."""
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
            raise _no_room(f"a prompt of {length} tokens", max_length)
        sampling_params.max_tokens = min(room, sampling_params.max_tokens or room)
        output = (await llm_engine.generate(prompt_ids, sampling_params, image_data(images))).outputs[0]
        if output.finish_reason == "abort":
            return {"reward": None}
        response = decode(tokenizer, output.token_ids, after=prompt_ids)
        reward = await self.reward(prompt + response, prompt, label)
        return {
            "reward": reward.reward,
            "scores": reward.score,
            "extra_logs": reward.extra_logs,
            "extra_texts": reward.extra_texts,
        }
