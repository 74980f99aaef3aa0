"""The agent contract: what users' own files import, and the default agent.

An executor turns a prompt into an episode. It is given an engine that remembers every request, asks it for
tokens, and says what the episode is worth.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.utils.text import decode, prompt_token_ids

if TYPE_CHECKING:  # users' files are checked without what takes seconds, and vLLM reads its environment
    from transformers import PreTrainedTokenizerBase
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams


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
        sampling_params: "SamplingParams",
        multi_modal_data: dict | None = None,
    ) -> "RequestOutput":
        """One request."""
        ...


class AgentExecutorBase(ABC):
    """One object for each engine process. `execute` runs for many samples at a time, so it keeps no state of
    one."""

    @abstractmethod
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
        """One episode. `await llm_engine.generate(prompt_token_ids, sampling_params)` returns vLLM's
        RequestOutput, as often as it is asked; `sampling_params` is this episode's own, `max_length` bounds
        a sequence, prompt and actions together.

        Returns a dictionary:
            reward: a number. None: where reward models give it.
            scores: what filtering and evaluation look at. Missing or None: the reward.
            extra_logs: numbers by name, which become metrics.
            observation_tokens, action_ranges: the whole sequence, and the [start, end) in it that are trained
                on. Without them every request is, and requests that go on where another ended are one
                sequence.
            truncated: the episode had to end. Missing: whether the last answer ran out of tokens.

        Log-probs, versions of the weights and seeds are known from the requests: other keys are not read.
        """


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One generation, then one call of the reward."""

    def __init__(self, reward: Callable[[str, str, Any], Awaitable[Reward]], *, is_chat: bool) -> None:
        """`reward(query, prompt, label)`: query is the prompt and the response as text, special tokens
        kept. `is_chat`: prompts are written by a chat template."""
        self.reward, self.is_chat = reward, is_chat

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
        prompt_ids = prompt_token_ids(hf_tokenizer, prompt, is_chat=self.is_chat)
        room = max_length - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in --data.max_len {max_length}"
            )
        sampling_params.max_tokens = min(room, sampling_params.max_tokens or room)
        output = (await llm_engine.generate(prompt_ids, sampling_params)).outputs[0]
        if output.finish_reason == "abort":
            return {"reward": None}
        response = decode(hf_tokenizer, output.token_ids, after=prompt_ids)
        reward = await self.reward(prompt + response, prompt, label)
        return {"reward": reward.reward, "scores": reward.score, "extra_logs": reward.extra_logs}
