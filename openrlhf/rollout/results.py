"""Validates an executor's result, and adds it to the Episode."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from openrlhf.agents.base import RewardError
from openrlhf.errors import warn_once
from openrlhf.rewards.values import named, read_floats, read_texts
from openrlhf.rollout.executors import EnvironmentFailed
from openrlhf.rollout.trajectories import NeverSampled, chosen_turns
from openrlhf.types import Episode, Turn

logger = logging.getLogger(__name__)


def read_result(episode: Episode, result: Any, *, source: str, reward_is_optional: bool) -> Episode:
    """Returns the episode with its reward and with the turns to train on, out of all recorded ones.
    agents/base.py describes the form of `result`.

    Raises EnvironmentFailed, which names the `source`, if the result's actions are invalid or were not
    sampled, and RewardError if a reward is invalid, or None without `reward_is_optional`.
    """
    if not isinstance(result, dict):
        raise EnvironmentFailed(f"{source} returned {type(result).__name__}, not a dict")
    if "reward" not in result:
        found = ", ".join(map(repr, result)) or "nothing"
        raise EnvironmentFailed(f"{source} returned a dict without 'reward'; it has {found}")
    truncated = result.get("truncated")
    if isinstance(truncated, str):  # "False" would be true
        raise EnvironmentFailed(f"{source} returned truncated {truncated!r}, not a bool")
    episode = replace(
        episode,
        turns=_turns_to_train_on(result, episode.turns, source),
        truncated=None if truncated is None else bool(truncated),
    )
    reward, score = result["reward"], result.get("scores")
    if reward is None and not reward_is_optional:
        raise RewardError(f"{source} returned the reward None, and the run has no reward model")

    def number(name: str, value: Any) -> float:
        return read_floats(name, value, 1, source)[0]

    reward = 0.0 if reward is None else number("reward", reward)
    return replace(
        episode,
        reward=reward,
        score=reward if score is None else number("scores", score),
        extra_logs={k: number(f"extra_logs[{k!r}]", v) for k, v in named("extra_logs", result, source)},
        extra_texts=read_texts(result, 1, source)[0],
    )


def _turns_to_train_on(result: dict, turns: Sequence[Turn], source: str) -> list[Turn]:
    token_ids, ranges = result.get("observation_tokens"), result.get("action_ranges")
    if token_ids is None and ranges is None:
        chosen = _with_turn_rewards(result.get("turn_rewards"), turns, source)
    elif token_ids is None or ranges is None:
        raise EnvironmentFailed(
            f"{source} returned only one of observation_tokens and action_ranges; return both or none"
        )
    else:
        chosen = _turns_at_ranges(token_ids, ranges, turns, source)
    if not any(len(turn.action_ids) for turn in chosen):
        raise EnvironmentFailed(f"{source} returned no action: nothing that llm_engine.generate sampled")
    return chosen


def _with_turn_rewards(turn_rewards: Any, turns: Sequence[Turn], source: str) -> list[Turn]:
    if turn_rewards is None:
        return list(turns)
    rewards = read_floats("turn_rewards", turn_rewards, len(turns), source)
    return [replace(turn, reward=reward) for turn, reward in zip(turns, rewards, strict=True)]


def _turns_at_ranges(
    observation_tokens: Any, action_ranges: Any, turns: Sequence[Turn], source: str
) -> list[Turn]:
    try:
        ranges = [(int(start), int(stop)) for start, stop in action_ranges]
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(
            f"{source} returned action_ranges that are not pairs of numbers: {error}"
        ) from error
    try:
        chosen, read = chosen_turns(_token_ids(observation_tokens, source), ranges, turns)
    except NeverSampled as error:
        raise EnvironmentFailed(f"{source} returned an {error}") from error
    if not read and any(turn.images for turn in turns):
        raise EnvironmentFailed(
            f"{source} returned observation_tokens without all the placeholder tokens that the policy read "
            f"for an image. Build them from prompt_token_ids and token_ids of llm_engine.generate's answers, "
            "or leave them out."
        )
    if not read:
        warn_once(logger, f"{source} {CHANGED_CONTEXT}")
    return chosen


def _token_ids(value: Any, source: str) -> np.ndarray:
    token_ids = np.asarray(value)
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        kind = f"{token_ids.dtype} of shape {token_ids.shape}"
        raise EnvironmentFailed(
            f"{source} returned observation_tokens that are not a list of token ids: {kind}"
        )
    return token_ids.astype(np.int32)


CHANGED_CONTEXT = (
    "returned observation_tokens whose tokens before an action differ from those that the policy read when "
    "it sampled the action. The action's log-prob belongs to the tokens that the policy read. Build "
    "observation_tokens from the prompts and answers of llm_engine.generate."
)
