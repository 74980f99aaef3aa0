"""Rewards from reward models: their input, and the addition of their scores to trajectories."""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.agents.chat_stream import ChatStream, TemplateProblem
from openrlhf.config.ppo import REWARD_FLAG
from openrlhf.data.bad_rows import BadRow
from openrlhf.data.encode import Encoder, Text
from openrlhf.data.messages import join_text
from openrlhf.data.scored import score_answer, scored_answer
from openrlhf.data.templates import ending
from openrlhf.errors import ErrorCode, UsageError, warn_once
from openrlhf.models.tokenizers import reads_tokens_like
from openrlhf.rows import Sample
from openrlhf.text import decode, prompt_token_ids
from openrlhf.types import Outcome, Prompt, Trajectory, not_none

logger = logging.getLogger(__name__)

FEEDBACK = "\u241ffeedback\u241f"
UNREAD = (
    "an agent's feedback is no message of the user or a tool in the policy's chat template, so a reward "
    "model with a template of its own reads it with the policy's markup, as a part of the answer: %r"
)


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
        is_cut = trajectory.truncated
        sample = score_answer(self._token_ids(trajectory), self.own, self.max_len, truncated=is_cut)
        return replace(sample, images=trajectory.images)

    def _token_ids(self, t: Trajectory) -> list[int]:
        is_conversation = self.has_template and t.prompt.messages is not None
        if self.reads_tokens and not is_conversation:
            return t.token_ids.tolist()
        if is_conversation:
            text = self._conversation(t)
        else:
            response = self._decoded(t, t.prompt_length, self._end(t, len(t.token_ids)))
            text = _text(self._prompt(t), response)
        ((token_ids, _),) = self.encode([text])
        return token_ids

    def _prompt(self, t: Trajectory) -> str:
        """Returns what the policy read first: the row's prompt, unless an agent wrote another one."""
        read, is_chat = t.token_ids[: t.prompt_length].tolist(), t.prompt.messages is not None
        is_own = t.images or read == prompt_token_ids(self.policy, t.prompt.text, is_chat=is_chat)
        return t.prompt.text if is_own else decode(self.policy, read)

    def _end(self, t: Trajectory, end: int) -> int:
        """Returns the end of an answer without its stop token."""
        return end - int(t.token_ids[end - 1] in self.stop_token_ids)

    def _decoded(self, t: Trajectory, start: int, end: int) -> str:
        return decode(self.policy, t.token_ids[start:end].tolist(), after=t.token_ids[:start].tolist())

    def _conversation(self, t: Trajectory) -> Text:
        """Renders the conversation and the answers with the reward model's template. Whitespace around an
        answer is removed, because it belongs to the policy's template. Feedback that is a message in the
        policy's template is one in the reward model's; other feedback is a part of the answer."""
        edges = [*(np.flatnonzero(np.diff(t.action_mask)) + 1).tolist(), len(t.token_ids)]
        edges += edges[-1:] * (len(edges) % 2)  # an empty answer behind feedback
        answers, told = [self._decoded(t, edges[0], self._end(t, edges[1]))], []
        for before, start, end in zip(edges[1:-1:2], edges[2::2], edges[3::2], strict=True):
            feedback = self._decoded(t, self._end(t, before), start)
            answer = self._decoded(t, start, self._end(t, end))
            if message := self._message(feedback):
                told.append(message)
                answers.append(answer)
            else:
                answers[-1] += feedback + answer
        messages, first = _answered(not_none(t.prompt.messages), answers[0])
        for message, answer in zip(told, answers[1:], strict=True):
            messages += [message, {"role": "assistant", "content": answer.strip()}]
        try:
            return scored_answer(messages, first, self.own, t.prompt.tools, is_open=t.truncated)
        except BadRow as reason:
            place = {"flag": REWARD_FLAG, "value": self.own.name_or_path}
            raise UsageError(ErrorCode.CHAT_TEMPLATE, f"{reason}\n{messages[-1]}", **place) from reason

    def _message(self, feedback: str) -> dict[str, str] | None:
        """Returns the message that the policy's chat template would write as this text between two answers;
        None if there is none."""
        for role, pattern in self._feedback:
            if found := pattern.fullmatch(feedback.strip()):
                return {"role": role, "content": found[1].strip()}
        if any(token in feedback for token in self.policy.all_special_tokens):
            warn_once(logger, UNREAD, feedback[:200])
        return None

    @cached_property
    def _feedback(self) -> list[tuple[str, re.Pattern[str]]]:
        """Patterns of feedback in the policy's template, with the role that the reward model reads it of."""
        found, own = [], ChatStream(self.own)
        for role in ("tool", "user"):
            asked, told = {"role": "user", "content": "?"}, {"role": role, "content": FEEDBACK}
            talk = [asked, {"role": "assistant", "content": "!"}, told]
            try:
                text = ChatStream(self.policy).behind(talk, 1, None, ending(self.policy)[0])
            except TemplateProblem:
                continue  # a policy of this template reads no such messages
            header, _, rest = (re.escape(part.strip()) for part in text.partition(FEEDBACK))
            with suppress(TemplateProblem):  # it reads tools' messages as the user's
                own.render([*talk, talk[1]], answering=False)
                asked = told
            end = re.escape(ending(self.policy)[0].strip())
            if header:
                found.append((asked["role"], re.compile(rf"(?:{end})?\s*{header}(.*){rest}", re.DOTALL)))
        return found


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
