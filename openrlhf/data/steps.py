"""Builds solutions with a label for every step from rows, for process reward models."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.data.bad_rows import BadRow, BadRowAction, read_value
from openrlhf.data.encode import Text, build_samples, tokenize_text, truncated
from openrlhf.data.files import Row, kind
from openrlhf.data.messages import from_column
from openrlhf.data.sources import Rows
from openrlhf.data.store import Samples, Skip, Tokens
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.rows import Steps
from openrlhf.text import decode

FAR_STEPS = "no placeholder within max_len"


class StepsDataset(Samples[Steps]):
    LABELS = ("labels", "label_starts")

    labels: np.ndarray
    """(steps,) labels of all solutions end to end: int64 token ids, or float32 probabilities of the first
    reward token."""
    label_starts: np.ndarray
    """(solutions + 1,) int64, start of each solution's labels."""

    def check_labels(self) -> None:
        if len(self.label_starts) != len(self) + 1 or self.label_starts[-1] != len(self.labels):
            raise ValueError(f"{len(self.labels)} labels do not fit {len(self)} solutions")

    def item(self, i: int) -> Steps:
        labels = self.labels[self.label_starts[i] : self.label_starts[i + 1]]
        return Steps(sample=self.sample(i), labels=torch.from_numpy(np.array(labels)))


def build_steps(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_key: str,
    label_key: str,
    placeholder_token: str,
    reward_tokens: Sequence[str] | None,
    max_len: int,
    bad_rows: BadRowAction = "error",
) -> StepsDataset:
    """Builds one solution from each row: its text unchanged, marked at the last token of each placeholder; no
    token crosses a placeholder's end.

    Labels are a list with an entry for each placeholder: texts of one token each (of `reward_tokens`, where
    given), or probabilities of the first of two reward tokens. All rows have the same kind. A text is
    truncated at max_len tokens, and its labels with it; one without a placeholder left is skipped and
    counted.

    Raises UsageError for a reward token that is not one token, for a bad row (see `read_each`), for labels of
    two kinds, for probabilities without two reward tokens, and when no solution is left.
    """
    label_of = _label_reader(tokenizer, reward_tokens)

    def read(row: Row) -> tuple[tuple[Text], np.ndarray]:
        text = read_value(row, input_key, str)
        values = from_column(read_value(row, label_key, list, str))  # the text of a list in CSV
        if not isinstance(values, list):
            raise BadRow(f"column {label_key!r} is {kind(values)}, not a list.")
        labels = _labels(values, label_key, label_of)
        ends = tuple(found.end() for found in re.finditer(re.escape(placeholder_token), text))
        _check_placeholders(text, len(ends), len(labels), placeholder_token)
        return (Text(text=text, ends=ends),), labels

    first_of_kind: dict[str, int] = {}

    def fit(i: int, tokens: list[Tokens], labels: np.ndarray) -> Sequence[Tokens] | Skip:
        ((token_ids, ends_step),) = tokens
        if sum(ends_step) != len(labels):
            raise BadRow(f"the tokenizer gives some placeholders {placeholder_token!r} no token.")
        sample = truncated(tokens[0], max_len)
        action_mask = sample[1]
        if True not in action_mask:
            return Skip(FAR_STEPS, len(token_ids)) if len(labels) else Skip("nothing to learn")
        first_of_kind.setdefault("text" if labels.dtype == np.int64 else "numbers", i)
        _check_kinds(first_of_kind, rows, label_key, reward_tokens)
        kept.append(labels[: sum(action_mask)])
        return [sample]

    store, kept = StepsDataset(), []
    build_samples(store, rows, read, fit, tokenizer, max_len=max_len, bad_rows=bad_rows, unit="solution")
    starts = np.cumsum([0, *map(len, kept)], dtype=np.int64)
    return store.with_labels(labels=np.concatenate(kept), label_starts=starts)


def reward_token_ids(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> tuple[int, ...]:
    """Returns the token id of each text. Raises UsageError unless each text is one token of the tokenizer,
    all different."""
    ids = {token: tokenize_text(token, tokenizer) for token in tokens}
    text = ""
    if wrong := [f"{token!r} has {_pieces(ids[token], tokenizer)}" for token in ids if len(ids[token]) != 1]:
        text = (
            f"each must be one token of the model's tokenizer.\n{', '.join(wrong)}.\n"
            "Choose texts that are in its vocabulary, or add them to tokenizer and model."
        )
    elif len({*map(tuple, ids.values())}) < max(2, len(tokens)):
        text = "name at least two different tokens, each once."
    if text:
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag="--data.reward_tokens", value=" ".join(tokens))
    return tuple(token_id for (token_id,) in ids.values())


def _pieces(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return f"{len(ids)} tokens ({' '.join(repr(decode(tokenizer, [token_id])) for token_id in ids)})"


def _label_reader(
    tokenizer: PreTrainedTokenizerBase, reward_tokens: Sequence[str] | None
) -> Callable[[str], int]:
    """Returns a function from a label to its token id, which raises BadRow for an invalid label."""
    if reward_tokens is None:
        return cache(partial(_any_token_id, tokenizer=tokenizer))
    ids = dict(zip(reward_tokens, reward_token_ids(tokenizer, reward_tokens), strict=True))

    def find(label: str) -> int:
        if label not in ids:
            raise BadRow(f"label {label!r} is none of --data.reward_tokens ({' '.join(ids)}).")
        return ids[label]

    return find


def _any_token_id(label: str, *, tokenizer: PreTrainedTokenizerBase) -> int:
    ids = tokenize_text(label, tokenizer)
    if len(ids) != 1:
        raise BadRow(f"label {label!r} has {_pieces(ids, tokenizer)}, and must be one token.")
    return ids[0]


def _labels(values: Sequence[Any], column: str, label_of: Callable[[str], int]) -> np.ndarray:
    """Returns (A,) int64 token ids or float32 probabilities."""
    if all(isinstance(value, str) for value in values):
        return np.array([label_of(value) for value in values], dtype=np.int64)
    for number, value in enumerate(values, start=1):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRow(
                f"column {column!r}: label {number} is {value!r} ({kind(value)}); labels are all text or all "
                "numbers."
            )
        if not 0 <= value <= 1:
            raise BadRow(f"column {column!r}: label {number} is {value!r}, not a probability from 0 to 1.")
    return np.array(values, dtype=np.float32)


def _check_placeholders(text: str, count: int, num_labels: int, placeholder: str) -> None:
    if count != num_labels:
        raise BadRow(f"{num_labels} labels for {count} placeholders {placeholder!r}.")
    if text.startswith(placeholder):
        raise BadRow(f"the text begins with the placeholder {placeholder!r}: there is no step before it.")


def _check_kinds(
    first_of_kind: Mapping[str, int], rows: Rows, label_key: str, reward_tokens: Sequence[str] | None
) -> None:
    error = partial(UsageError, flag="--data.label_key", value=label_key)
    if "numbers" in first_of_kind and (reward_tokens is None or len(reward_tokens) != 2):
        raise error(
            ErrorCode.CONFLICT,
            f"the labels of {rows.origin(first_of_kind['numbers'])} are probabilities of the first of two\n"
            "tokens. Name both with --data.reward_tokens, such as + -",
        )
    if len(first_of_kind) == 2:
        (one, first), (other, second) = first_of_kind.items()
        raise error(
            ErrorCode.INVALID_ROW,
            f"{one} at {rows.origin(first)}, but {other} at {rows.origin(second)}.\n"
            "Give all labels one kind: tokens or probabilities.",
        )
