"""Answers that nobody sampled, as samples."""

from typing import TYPE_CHECKING

import numpy as np

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.text import prompt_token_ids
from openrlhf.types import Prompt, Trajectory, runs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def given_answer(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Prompt,
    answer: str,
    *,
    is_chat: bool,
    max_len: int,
    version: int,
) -> Trajectory:
    """Returns a sample whose actions are the tokens of `answer` and the one that ends it. Its
    `rollout_log_probs` are NaN, its reward is 0. `version`: the current one of the weights.

    Raises UsageError for more than `max_len` tokens, a prompt with images, and a tokenizer without an end
    token.
    """
    if (end := tokenizer.eos_token_id) is None:
        raise UsageError(ErrorCode.INVALID_VALUE, "the policy's tokenizer has no token that ends an answer")
    if prompt.images:
        raise UsageError(ErrorCode.UNSUPPORTED, "answers to prompts with images cannot be given")
    before = prompt_token_ids(tokenizer, prompt.text, is_chat=is_chat)
    actions = [*tokenizer(answer, add_special_tokens=False)["input_ids"], end]
    if (length := len(before) + len(actions)) > max_len:
        text = (
            f"prompt {prompt.prompt_id} and its answer have {length} tokens; leave it out, or raise the limit"
        )
        raise UsageError(ErrorCode.TOO_LONG, text, flag="--data.max_len", value=max_len)
    return Trajectory(
        prompt=prompt,
        sample_index=0,
        seed=0,
        token_ids=np.array([*before, *actions], np.int32),
        action_mask=np.arange(length) >= len(before),
        rollout_log_probs=np.full(len(actions), np.nan, np.float32),
        weight_versions=runs([version] * len(actions)),
        reward=0.0,
        score=0.0,
    )
