"""Rows as samples: which tokens a supervised run reads, and which of them it learns."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerBase

from openrlhf.datasets.bad_rows import BadRow, Policy, read_rows, value_of
from openrlhf.datasets.sources import Row, Rows
from openrlhf.datasets.store import SampleStore
from openrlhf.datasets.templates import Message, as_messages, check_templates, render_messages, render_prompt

logger = logging.getLogger(__name__)


def build_sft_samples(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_key: str,
    output_key: str | None,
    apply_chat_template: bool,
    input_template: str | None,
    multiturn: bool,
    pretrain: bool,
    max_len: int,
    bad_rows: Policy = "error",
) -> SampleStore:
    """One sample of each row that has something to learn.

    pretrain           `input_key` is plain text; loss on every token but the first, no end-of-sequence token.
    no chat template   input_template.format(input) is the prompt, `output_key` the response.
    chat template      A text is one user message, lists of messages are used as they are. `output_key` adds
                       the reply; without it the last message is the reply. Loss on the assistant messages of
                       the reply; with `multiturn`, on those of the whole conversation. A turn is learned with
                       the token by which the template ends it, because the policy must learn to stop.

    Where the response does not end with the end-of-sequence token, that token is appended. A sample of more
    than max_len tokens is cut there and is not given an end: its text did not end. Rows without a token to
    learn, or with a prompt of max_len - 2 tokens or more, are dropped and counted.

    ValueError for a bad row (see `read_rows`), for a template that shows an assistant turn differently once
    other messages follow, and when no sample is left.
    """
    if not pretrain:
        check_templates(tokenizer, apply_chat_template=apply_chat_template, input_template=input_template)
        _check_keys(output_key, apply_chat_template=apply_chat_template, multiturn=multiturn)

    def read(row: Row) -> _Text:
        if pretrain:
            return _pretrain_text(row, input_key)
        if apply_chat_template:
            return _chat_text(row, tokenizer, input_key, output_key, multiturn)
        assert output_key is not None  # _check_keys
        return _plain_text(row, tokenizer, input_key, output_key, input_template)

    read_texts, skipped = read_rows(rows, read, bad_rows)
    texts = list(read_texts.values())
    dataset = SampleStore()
    dataset.dropped.update({"bad row": skipped} if skipped else {})
    for token_ids, action_mask in _encode(texts, tokenizer):
        if token_ids and not pretrain and action_mask[-1] and token_ids[-1] != tokenizer.eos_token_id:
            token_ids.append(tokenizer.eos_token_id)
            action_mask.append(True)
        reason = _reason_to_drop(action_mask, max_len, pretrain)
        if reason:
            dataset.dropped[reason] += 1
            continue
        dataset.truncated += len(token_ids) > max_len
        dataset.append(token_ids[:max_len], action_mask[:max_len])
    if dataset.dropped:
        logger.warning("%d of %d rows were dropped: %s", dataset.dropped.total(), len(rows), _counts(dataset))
    if not len(dataset):
        raise ValueError(
            f"No sample is left of {len(rows)} rows: {_counts(dataset)}.\n"
            f"The first row is {rows.origin(0)}; --data.max_len is {max_len}."
        )
    return dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    text: str
    spans: tuple[tuple[int, int], ...]
    """Characters to learn: [start, end) in ascending order. Empty: nothing to learn."""


def _check_keys(output_key: str | None, *, apply_chat_template: bool, multiturn: bool) -> None:
    if multiturn and not apply_chat_template:
        raise ValueError(
            "--data.multiturn: turns are found by the chat template. Add --data.apply_chat_template."
        )
    if output_key is None and not apply_chat_template:
        raise ValueError(
            "--data.output_key: not set, so there is no response to learn. Name its column;\n"
            "for conversations add --data.apply_chat_template, for plain text --model.pretrain_mode_enable."
        )


def _pretrain_text(row: Row, input_key: str) -> _Text:
    text = value_of(row, input_key, str)
    return _Text(text=text, spans=((0, len(text)),) if text.strip() else ())


def _plain_text(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    input_key: str,
    output_key: str,
    input_template: str | None,
) -> _Text:
    prompt = render_prompt(
        value_of(row, input_key, str), tokenizer, apply_chat_template=False, input_template=input_template
    )
    text = prompt + value_of(row, output_key, str).rstrip("\n")
    has_both_sides = prompt and text[len(prompt) :].strip()
    return _Text(text=text, spans=((len(prompt), len(text)),) if has_both_sides else ())


def _chat_text(
    row: Row, tokenizer: PreTrainedTokenizerBase, input_key: str, output_key: str | None, multiturn: bool
) -> _Text:
    messages = as_messages(value_of(row, input_key, str, list))
    if output_key is None:
        reply_starts = len(messages) - 1
    else:
        reply_starts = len(messages)
        messages += as_messages(value_of(row, output_key, str, list), role="assistant")
    first = 0 if multiturn else reply_starts
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        place = "no message" if multiturn else "the last message is not"
        raise BadRow(f"{place} of the assistant: role {messages[-1]['role']!r} has nothing to learn.")
    return _mark_turns(messages[: turns[-1] + 1], turns, tokenizer)


def _mark_turns(
    messages: Sequence[Message], turns: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> _Text:
    """The conversation with the characters of `turns`: from the end of what the policy read before the turn
    to the end of what the template makes of the turn. What follows the turn's end (a newline) is not written
    by the policy."""
    text = render_messages(messages, tokenizer, add_generation_prompt=False).rstrip("\n")
    spans = []
    for turn in turns:
        prompt = render_messages(messages[:turn], tokenizer, add_generation_prompt=True)
        ended = render_messages(messages[: turn + 1], tokenizer, add_generation_prompt=False).rstrip()
        content = messages[turn].get("content")
        is_shown = not isinstance(content, str) or content.strip() in text[len(prompt) : len(ended)]
        if not (text.startswith(prompt) and text.startswith(ended) and is_shown):
            raise ValueError(
                f"--data.apply_chat_template: the template rewrites the assistant's message {turn + 1} of "
                f"{len(messages)} afterwards,\nso the loss would fall on a text that the policy never wrote. "
                "Use a template that keeps it\n(--data.tokenizer_chat_template), or a row for each reply "
                "without --data.multiturn."
            )
        if content:
            spans.append((len(prompt), len(ended)))
    return _Text(text=text, spans=tuple(spans))


def _encode(
    texts: Sequence[_Text], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], list[bool]]]:
    """(token ids, True where the token is learned)"""
    if not tokenizer.is_fast:
        yield from (_encode_slow(text, tokenizer) for text in texts)
        return
    encoder = _whole_token_encoder(tokenizer)
    for start in range(0, len(texts), 1000):  # the tokenizer works on one list of texts in parallel
        yield from _encode_fast(texts[start : start + 1000], tokenizer, encoder)


def _encode_fast(
    texts: Sequence[_Text], tokenizer: PreTrainedTokenizerBase, encoder: Tokenizer
) -> Iterator[tuple[list[int], list[bool]]]:
    encoded = encoder.encode_batch([text.text for text in texts], add_special_tokens=False)
    prompts = [text.text[: text.spans[0][0]] if text.spans else "" for text in texts]
    encoded_prompts = encoder.encode_batch(prompts, add_special_tokens=False)
    for text, whole, prompt in zip(texts, encoded, encoded_prompts, strict=True):
        token_ids, prompt_ids = whole.ids, prompt.ids
        begins, ends = np.array(whole.offsets, dtype=np.int64).reshape(-1, 2).T
        crossed = any(((begins < start) & (start < ends)).any() for start, _ in text.spans)
        if crossed or token_ids[: len(prompt_ids)] != prompt_ids:
            yield _encode_pieces(text, tokenizer)
            continue
        learned = np.zeros(len(token_ids), dtype=np.bool_)
        for start, end in text.spans:
            learned |= (begins >= start) & (ends <= end)
        yield token_ids, learned.tolist()


def _whole_token_encoder(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The tokenizer with the full extent of its tokens. Many post-processors leave the space before a word
    out of its offsets, and give tokens of nothing but spaces no width, so that indentation would not be
    learned."""
    encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    encoder.post_processor = processors.ByteLevel(trim_offsets=False)
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _encode_pieces(text: _Text, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Prompts and replies tokenised apart, as a policy meets them: no token spans the border between them."""
    token_ids: list[int] = []
    learned: list[bool] = []
    borders = [0, *(border for span in text.spans for border in span), len(text.text)]
    for i, (start, end) in enumerate(pairwise(borders)):
        piece = tokenizer(text.text[start:end], add_special_tokens=False)["input_ids"] if start < end else []
        token_ids += piece
        learned += [i % 2 == 1] * len(piece)
    return token_ids, learned


def _encode_slow(text: _Text, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Without offsets the pieces are all there is to go by; so they must say the same as the whole."""
    token_ids, learned = _encode_pieces(text, tokenizer)
    whole = tokenizer(text.text, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(token_ids) != tokenizer.decode(whole):
        raise ValueError(
            "--data.disable_fast_tokenizer: this tokenizer changes a text that is tokenised in pieces,\n"
            "and has no other way to find the border of prompt and reply. Drop the flag."
        )
    return token_ids, learned


def _reason_to_drop(action_mask: list[bool], max_len: int, pretrain: bool) -> str:
    """Empty when the sample stays. Nothing predicts the first token, so it is never learned."""
    if action_mask:
        action_mask[0] = False
    if True not in action_mask:
        return "nothing to learn"
    if not pretrain and action_mask.index(True) >= max_len - 2:
        return "prompt of max_len - 2 tokens or more"
    return ""


def _counts(dataset: SampleStore) -> str:
    return ", ".join(f"{count} × {reason}" for reason, count in dataset.dropped.items())
