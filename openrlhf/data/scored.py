"""Texts as reward models read them: they are scored at their last token, and not learned."""

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from operator import eq

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.data.answers import assistant_turns
from openrlhf.data.encode import Text
from openrlhf.data.messages import is_blank
from openrlhf.data.templates import Message, Tools, render_messages
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.rows import Sample


def scored_answer(
    messages: Sequence[Message],
    first: int,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None = None,
    *,
    is_open: bool = False,
) -> Text:
    """Returns the conversation up to the last assistant turn, with everything after the prompt (the messages
    before `first`) marked. The text is only scored, not learned, so a template may render the answer in any
    way. `is_open`: the last turn was truncated and is rendered without an end."""
    turns = assistant_turns(messages, first)
    render = partial(render_messages, tokenizer=tokenizer, tools=tools)
    prompt = render(messages[:first], add_generation_prompt=True)
    text = render(messages[: turns[-1] + 1], add_generation_prompt=False, is_open=is_open).rstrip("\n")
    start = len([*takewhile(bool, map(eq, prompt, text))])  # length of the common prefix
    is_empty = all(is_blank(messages[turn]) for turn in turns)
    return Text(text=text, spans=() if is_empty else ((start, len(text)),), is_chat=True)


def with_end(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the token ids, with an end-of-sequence token appended where they do not end with one."""
    end = end_token_id(tokenizer)
    return token_ids if token_ids and token_ids[-1] == end else [*token_ids, end]


def end_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the end-of-sequence token, at which reward models are read. Raises UsageError without one."""
    if tokenizer.eos_token_id is None:
        text = (
            "the tokenizer has no end-of-sequence token, at which a reward model is read.\n"
            "Set eos_token in its tokenizer_config.json."
        )
        raise UsageError(ErrorCode.INVALID_MODEL, text, value=tokenizer.name_or_path)
    return tokenizer.eos_token_id


def score_answer(
    token_ids: list[int], tokenizer: PreTrainedTokenizerBase, max_len: int | None, *, truncated: bool
) -> Sample:
    """Builds the sample of prompt and answer that a reward model scores, of at most max_len tokens. A
    finished answer ends with an end-of-sequence token, as in the model's training. A `truncated` one does
    not: its last token is scored."""
    ids = token_ids[:max_len] if truncated else with_end(token_ids, tokenizer)
    return score_last(ids, max_len or len(ids))


def cut_before_end(token_ids: list[int], max_len: int) -> list[int]:
    """Truncates to max_len tokens but keeps the last token, at which a reward model is read."""
    return token_ids if len(token_ids) <= max_len else [*token_ids[: max_len - 1], token_ids[-1]]


def score_last(token_ids: list[int], max_len: int) -> Sample:
    """Builds the sample that a reward model scores: its only action is the last token. Beyond max_len tokens,
    those just before the last one are cut off."""
    ids = torch.tensor(cut_before_end(token_ids, max_len))
    return Sample(token_ids=ids, action_mask=torch.arange(len(ids)) == len(ids) - 1)
