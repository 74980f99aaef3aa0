"""Text environments with the `reset` and `step` of gymnasium and GEM."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from openrlhf.api import ErrorCode, Session, SessionExecutor, UsageError, call_in_time
from openrlhf.environments.conversation import Conversation
from openrlhf.environments.randomness import GlobalRandom


class TextEnvironment(Protocol):
    """An environment of texts. Its optional method `close` is called at the end of the episode."""

    def reset(self, *, seed: int) -> tuple[str, dict]:
        """Begins the episode. Returns (first text for the policy, info); info is ignored."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Returns (next text for the policy, reward, terminated, truncated, info); info is ignored."""
        ...


class GymExecutor(SessionExecutor, ABC):
    """Runs one environment per episode, whose observations become user messages. The reward is the sum over
    the turns; the metric `rollout/turns` is their number."""

    draws_globally = True
    """True: the environment draws from the global random generators of Python or numpy; each episode gets
    states of its own, and calls of environments run one at a time. False: calls run concurrently, and methods
    may be `async`."""

    @abstractmethod
    def make(self, prompt: str, label: Any) -> TextEnvironment:
        """Returns the environment of one episode, from the row's prompt (templates applied) and its label."""

    def seed(self, label: Any) -> int:
        """Returns the seed of `reset` and of the global random generators; by default the label."""
        return parse_seed(label)

    async def play(
        self, prompt: str, label: Any, session: Callable[[], Session], step_timeout: float | None
    ) -> dict:
        """Runs one episode with the limits of MultiTurnAgentExecutor. The episode is truncated if one of them
        or the environment truncates it."""
        talk = Conversation(session())
        seed = self.seed(label)
        call = GlobalRandom(seed).call if self.draws_globally else call_in_time
        call = partial(call, seconds=step_timeout)
        environment = await call(self.make, prompt, label)
        rewards, terminated, truncated = [], False, False
        try:
            text, _ = await call(environment.reset, seed=seed)
            while not terminated and not truncated and (action := await talk.answer(text)) is not None:
                text, reward, terminated, truncated, _ = await call(environment.step, action)
                rewards.append(float(reward))
        finally:
            if close := getattr(environment, "close", None):
                await call_in_time(close, seconds=step_timeout)
        return {
            "reward": sum(rewards),
            "turn_rewards": rewards,
            "truncated": truncated or not terminated or talk.is_cut,
            "extra_logs": {"turns": len(rewards)},
        }


def parse_seed(label: Any) -> int:
    """Returns the label as an integer seed. Raises UsageError if it is not a whole number."""
    try:
        return int(label)
    except (TypeError, ValueError):
        text = f"the label {label!r} is not a seed; name a column of whole numbers, or define seed()"
        raise UsageError(ErrorCode.INVALID_ROW, text, flag="--data.label_key") from None
