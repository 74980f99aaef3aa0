"""Text environments with `reset` and `step`, as gymnasium and GEM have them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.agents.base import AgentExecutorBase, Engine, call_in_time
from openrlhf.completions import SamplingParams
from openrlhf.environments.conversation import Conversation
from openrlhf.environments.randomness import GlobalRandom

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextEnvironment(Protocol):
    """Text in, text out. Where it has a method `close`, the end of the episode calls it."""

    def reset(self, *, seed: int) -> tuple[str, dict]:
        """(what the policy is told first, anything)."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """(what it is told next, reward, terminated, truncated, anything)."""
        ...


class GymExecutor(AgentExecutorBase, ABC):
    """An environment for each episode, whose observations are user messages to the policy. The reward is the
    sum over the turns; the metric `rollout/turns` their number."""

    writes_messages = True
    draws_globally = True
    """The environment draws from the global random numbers of Python or numpy: each episode has its own, and
    calls of environments run one at a time. False: side by side, and methods may be `async`."""

    @abstractmethod
    def make(self, prompt: str, label: Any) -> TextEnvironment:
        """The environment of one episode, from the row's prompt, templates applied, and its label."""

    def seed(self, label: Any) -> int:
        """Of `reset`, and of what is drawn globally: the label, unless a subclass says otherwise."""
        return seed_of(label)

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: "PreTrainedTokenizerBase",
        llm_engine: Engine,
        *,
        max_turns: int | None = None,
        step_timeout: float | None = None,
    ) -> dict:
        """Limits are those of MultiTurnAgentExecutor. Truncated: by one of them, or by the environment."""
        talk = Conversation(llm_engine, hf_tokenizer, sampling_params, max_length, max_turns)
        seed = self.seed(label)
        own = GlobalRandom(seed).within if self.draws_globally else _unchanged

        def call(method: Callable, *arguments: Any, **options: Any) -> Any:
            return call_in_time(own(method), *arguments, seconds=step_timeout, **options)

        environment = await call(self.make, prompt, label)
        rewards, terminated, truncated = [], False, False
        try:
            told, _ = await call(environment.reset, seed=seed)
            while not terminated and not truncated and (action := await talk.answer(told)) is not None:
                told, reward, terminated, truncated, _ = await call(environment.step, action)
                rewards.append(float(reward))
        finally:
            if close := getattr(environment, "close", None):
                await call_in_time(close, seconds=None)
        return {
            "reward": sum(rewards),
            "turn_rewards": rewards,
            "truncated": truncated or not terminated or talk.is_cut,
            "extra_logs": {"turns": len(rewards)},
        }


def _unchanged(method: Callable) -> Callable:
    return method


def seed_of(label: Any) -> int:
    try:
        return int(label)
    except (TypeError, ValueError):
        remedy = "name a column of whole numbers with --data.label_key, or define seed(self, label)"
        raise ValueError(f"the label {label!r} is no seed; {remedy}") from None
