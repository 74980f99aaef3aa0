"""Scores the samples of a loop by the user's reward function."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

from openrlhf.rewards.process import RewardFunc
from openrlhf.rewards.values import read_rewards
from openrlhf.text import decode_response
from openrlhf.types import PromptGroup, Trajectory


def scored(groups: Sequence[PromptGroup], reward: RewardFunc, decode: Callable) -> list[PromptGroup]:
    """Returns the groups with the rewards of one call of the function for all samples that have not failed.
    Raises UsageError for an answer that is no list of rewards. Its own errors pass."""
    samples = {t.sample: t for group in groups for t in group.trajectories if t.ok}
    if not samples:
        return list(groups)
    last = list(samples.values())  # of an episode with several sequences, the last one
    prompts = [t.prompt.text for t in last]
    queries = [t.prompt.text + decode_response(t, decode) for t in last]
    answer = reward(queries, prompts, [deepcopy(t.prompt.label) for t in last])
    if inspect.iscoroutine(answer):
        answer = asyncio.run(answer)
    name = getattr(reward, "__name__", "the reward function")
    rewards = dict(zip(samples, read_rewards(answer, len(last), name), strict=True))

    def with_reward(t: Trajectory) -> Trajectory:
        if t.sample not in rewards:
            return t
        own = rewards[t.sample]
        logs = {"extra_logs": own.extra_logs, "extra_texts": own.extra_texts}
        return replace(t, reward=own.reward, score=own.score, turn_rewards=t.turn_rewards[:0], **logs)

    return [replace(group, trajectories=[with_reward(t) for t in group.trajectories]) for group in groups]
