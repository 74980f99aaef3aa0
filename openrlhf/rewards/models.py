"""Rewards from reward models: their input, and the addition of their scores to trajectories."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.config.ppo import REWARD_FLAG
from openrlhf.data.bad_rows import BadRow
from openrlhf.data.encode import Encoder, Text
from openrlhf.data.messages import join_text
from openrlhf.data.scored import score_last, scored_answer, with_end
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.tokenizers import reads_tokens_like
from openrlhf.rows import Sample
from openrlhf.text import decode
from openrlhf.types import Outcome, Prompt, Trajectory, not_none


class RewardReader:
    """Converts a trajectory to a reward model's input. Its only action is the token at which the score is
    read.

    chat template of its own    the conversation as that template shows it, as in the model's training
    another vocabulary          the text that the policy read and wrote, in the model's tokens
    else                        the sampled tokens themselves

    A finished response is followed by an end-of-sequence token, as in the reward model's training. A
    truncated response is not: its last token is scored.
    """

    def __init__(
        self,
        policy: PreTrainedTokenizerBase,
        own: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Sequence[int],
        max_len: int | None,
    ) -> None:
        """`policy`, `own`: tokenizers of the policy and of the reward model. `stop_token_ids`: tokens that
        end a response of the policy. `max_len`: maximum length that the reward model reads; None: no
        limit."""
        self.policy, self.own = policy, own
        self.stop_token_ids, self.max_len = stop_token_ids, max_len
        self.encode = Encoder(own)
        self.reads_tokens = reads_tokens_like(own, policy)
        self.has_template = has_own_template(own, policy)

    def __call__(self, trajectory: Trajectory) -> Sample:
        token_ids = self._token_ids(trajectory)
        if trajectory.truncated:
            token_ids = token_ids[: self.max_len]
            sample = score_last(token_ids, len(token_ids))
        else:
            sample = score_last(with_end(token_ids, self.own), self.max_len or len(token_ids) + 1)
        return replace(sample, images=trajectory.images)

    def _token_ids(self, t: Trajectory) -> list[int]:
        is_conversation = self.has_template and t.prompt.messages is not None
        if self.reads_tokens and not is_conversation:
            return t.token_ids.tolist()
        start = t.prompt_length
        response_ids = t.token_ids[start:].tolist()
        if response_ids[-1] in self.stop_token_ids:
            response_ids = response_ids[:-1]
        response = decode(self.policy, response_ids, after=t.token_ids[:start].tolist())
        text = self._conversation(t, response) if is_conversation else _text(t.prompt.text, response)
        ((token_ids, _),) = self.encode([text])
        return token_ids

    def _conversation(self, t: Trajectory, response: str) -> Text:
        """Renders the conversation and the response with the reward model's template. Whitespace around the
        response is removed, because it belongs to the policy's template."""
        messages, first = _answered(not_none(t.prompt.messages), response)
        try:
            return scored_answer(messages, first, self.own, t.prompt.tools, is_open=t.truncated)
        except BadRow as reason:
            place = {"flag": REWARD_FLAG, "value": self.own.name_or_path}
            raise UsageError(ErrorCode.CHAT_TEMPLATE, f"{reason}\n{messages[-1]}", **place) from reason


def _answered(messages: Sequence[Mapping[str, Any]], response: str) -> tuple[list[dict[str, Any]], int]:
    """Returns the conversation with the response, and the number of messages before its turn. A response that
    continues the assistant's last message becomes one message with it."""
    *before, last = map(dict, messages)
    if last["role"] == "assistant":
        begun = join_text(last["content"]) or ""
        return [*before, last | {"content": begun + response.rstrip()}], len(before)
    return [*before, last, {"role": "assistant", "content": response.strip()}], len(messages)


def has_own_template(own: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> bool:
    """Returns True if the reward model has a chat template that differs from the policy's."""
    return own.chat_template not in (None, policy.chat_template)


def check_conversations(prompts: Iterable[Prompt], own: PreTrainedTokenizerBase, path: str) -> None:
    """Raises UsageError if the reward model's chat template rejects a conversation. Tries one conversation
    for each sequence of roles."""
    conversations = {
        tuple(m["role"] for m in p.messages): p.messages for p in prompts if p.messages is not None
    }
    for roles, messages in conversations.items():
        try:
            scored_answer(*_answered(messages, "Yes."), own)
        except BadRow as reason:
            text = (
                "the chat template of this reward model rejects messages with the roles "
                f"{', '.join(roles)}, assistant: {reason}\nChange the prompts (put the text of a system "
                "message at the head of the user's), or remove the chat template from\nthe reward model's "
                "tokenizer: the reward model then reads the policy's text."
            )
            raise UsageError(ErrorCode.CHAT_TEMPLATE, text, flag=REWARD_FLAG, value=path) from reason


def _text(prompt: str, response: str) -> Text:
    span = ((len(prompt), len(prompt) + len(response)),) if prompt and response else ()
    return Text(text=prompt + response, spans=span)


def read_by_models(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Returns the sequences that reward models score: the last one of each successful episode."""
    return list({t.sample: t for t in trajectories if t.ok}.values())


def add_model_rewards(
    trajectories: Sequence[Trajectory],
    scores: Sequence[np.ndarray],
    *,
    names: Sequence[str],
    weights: Sequence[float],
    has_function: bool,
) -> list[Trajectory]:
    """Adds the weighted sum of an episode's scores to the reward of all its sequences. `scores` has an entry
    (M,), of M models, for each of `read_by_models(trajectories)`. If a score is not finite, the whole episode
    fails with REWARD_ERROR.

    `has_function`: True if the episode's score, which filtering and evaluation use, remains that of the
    reward function. Otherwise the sum is added to the score, too. The models' scores are logged in
    `extra_logs` as `reward_model/{name}`.
    """
    samples = [t.sample for t in read_by_models(trajectories)]
    of = dict(zip(samples, scores, strict=True))
    return [_with_scores(t, of[t.sample], names, weights, has_function) if t.ok else t for t in trajectories]


def _with_scores(
    t: Trajectory, scores: np.ndarray, names: Sequence[str], weights: Sequence[float], has_function: bool
) -> Trajectory:
    by_name = dict(zip(names, scores.tolist(), strict=True))
    broken = {name: score for name, score in by_name.items() if not math.isfinite(score)}
    if broken:
        error = ", ".join(f"reward model {name} returned {score}" for name, score in broken.items())
        return replace(t, reward=None, score=None, outcome=Outcome.REWARD_ERROR, error=error)
    total = sum(weight * score for weight, score in zip(weights, by_name.values(), strict=True))
    return replace(
        t,
        reward=not_none(t.reward) + total,
        score=not_none(t.score) + (0 if has_function else total),
        extra_logs=t.extra_logs | {f"reward_model/{name}": score for name, score in by_name.items()},
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """Returns the last component of each path. If two are equal, all get numbers."""
    names = [path.rstrip("/").rpartition("/")[2] for path in paths]
    return names if len({*names}) == len(names) else [f"{name}_{i}" for i, name in enumerate(names)]
