"""The agent contract: what users' own files import, and the default agent.

An executor turns a prompt into an episode. It is given the engine, asks it for tokens, and answers with the
exact tokens that were sampled: nothing is ever tokenised twice.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from openrlhf.utils.text import decode, prompt_token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    reward: float
    score: float
    """What filtering and evaluation look at; the reward where the function gives no score of its own."""
    extra_logs: dict[str, float] = field(default_factory=dict)


class RewardError(Exception):
    """A reward could not be computed. The episode is counted as failed and is not trained on."""

    def __init__(self, message: str, episode: dict | None = None) -> None:
        super().__init__(message)
        self.episode = episode
        """The result dictionary as far as it came, so that the journal keeps the tokens."""


class AgentExecutorBase(ABC):
    """One object for each engine process. `execute` runs for many samples at a time, so it keeps no state of
    one."""

    @abstractmethod
    async def execute(
        self, prompt: str, label: Any, sampling_params, max_length: int, hf_tokenizer, llm_engine, images=None
    ) -> dict:
        """One episode. `llm_engine.generate(prompt_token_ids, sampling_params)` returns vLLM's RequestOutput;
        `sampling_params` is this episode's own; `max_length` bounds prompt and actions together.

        Returns a dictionary with `prompt`, `label`, `observation_tokens` (list[int], the whole sequence),
        `action_ranges` (list of [start, end) in it), `rollout_log_probs` (one float for each token, 0.0 where
        it is no action), `reward`, `scores`, and optionally `truncated`, `extra_logs`, `finish_reason`,
        `weight_versions` (one int for each action).
        """


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One generation, then one call of the reward."""

    def __init__(self, reward: Callable[[str, str, Any], Awaitable[Reward]], *, is_chat: bool) -> None:
        """`reward(query, prompt, label)`: query is the prompt and the response as text, special tokens
        kept. `is_chat`: prompts are written by a chat template."""
        self.reward, self.is_chat = reward, is_chat

    async def execute(
        self, prompt: str, label: Any, sampling_params, max_length: int, hf_tokenizer, llm_engine, images=None
    ) -> dict:
        prompt_ids = prompt_token_ids(hf_tokenizer, prompt, is_chat=self.is_chat)
        room = max_length - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in --data.max_len {max_length}"
            )
        sampling_params.max_tokens = min(room, sampling_params.max_tokens or room)
        output = (await llm_engine.generate(prompt_ids, sampling_params)).outputs[0]
        response_ids = list(output.token_ids)
        episode = {
            "prompt": prompt,
            "label": label,
            "observation_tokens": prompt_ids + response_ids,
            "action_ranges": [(len(prompt_ids), len(prompt_ids) + len(response_ids))],
            "rollout_log_probs": [0.0] * len(prompt_ids) + sampled_log_probs(output),
            "weight_versions": weight_versions(output),
            "finish_reason": output.finish_reason,
            "truncated": output.finish_reason == "length",
        }
        if output.finish_reason == "abort":
            return episode | {"reward": None, "scores": None}
        try:
            response = decode(hf_tokenizer, response_ids, after=prompt_ids)
            reward = await self.reward(prompt + response, prompt, label)
        except RewardError as error:
            error.episode = episode
            raise
        return episode | {"reward": reward.reward, "scores": reward.score, "extra_logs": reward.extra_logs}


def sampled_log_probs(output) -> list[float]:
    """Of the sampled tokens, under the distribution they were sampled from."""
    return [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]


def weight_versions(output) -> list[int]:
    """One for each sampled token: which weights chose it."""
    versions = [0] * len(output.token_ids)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
    return versions
