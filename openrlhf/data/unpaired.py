"""Builds unpaired preferences (KTO) from rows: answers labelled good or bad."""

import logging
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.data.answers import AnswerColumns
from openrlhf.data.bad_rows import BadRow, BadRowAction, read_number
from openrlhf.data.encode import Text, build_samples, finish, reason_to_skip
from openrlhf.data.files import Row, kind
from openrlhf.data.sources import Rows
from openrlhf.data.store import SampleStore, Skip, Tokens, TwoSamples
from openrlhf.data.templates import PromptTemplate
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.rows import UnpairedExample

logger = logging.getLogger(__name__)


class UnpairedDataset(TwoSamples[UnpairedExample]):
    """Answers with labels: sample 2i is answer i, sample 2i + 1 its mismatched answer."""

    LABELS = ("desirable", "ref_log_probs")

    desirable: np.ndarray
    """(answers,) bool, True for good answers."""

    def item(self, i: int) -> UnpairedExample:
        return UnpairedExample(
            sample=self.sample(2 * i),
            mismatched=self.sample(2 * i + 1),
            desirable=bool(self.desirable[i]),
            ref_log_probs=self.read_ref(i),
        )

    def sequences(self, i: int) -> tuple[np.ndarray, ...]:
        """See `Samples`. Mismatched answers are in a row of their own, so their numbers are negative."""
        sample, mismatched = super().sequences(i)
        return sample, -1 - mismatched


def build_unpaired(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_key: str,
    output_key: str | None,
    label_key: str,
    apply_chat_template: bool,
    input_template: str | None,
    max_len: int,
    seed: int,
    bad_rows: BadRowAction = "error",
    tools_key: str | None = None,
) -> UnpairedDataset:
    """Builds one answer from each row that has something to learn; prompts, answers and their marks are those
    of `build_sft_samples`.

    The mismatched answer is that of a row with another prompt: the tokens of this prompt and that answer end
    to end, truncated at max_len. The choice of the row follows from `seed` and the dataset alone (see
    `other_prompts`), so the KL estimated on it depends neither on micro-batches nor on the number of ranks.

    Raises UsageError for a bad row (see `read_each`), such as one whose answer a template does not render
    directly after its generation prompt, when no answer is left, and when all that are left have the same
    prompt.
    """
    template = PromptTemplate(tokenizer, apply_chat_template, input_template)
    answer = AnswerColumns.of(template, input_key, output_key, tools_key=tools_key)

    def read(row: Row) -> tuple[tuple[Text, ...], bool]:
        return answer(row), _label(row, label_key)

    def fit(_: int, tokens: list[Tokens], label: bool) -> Sequence[Tokens] | Skip:
        """Keeps whole sequences: another prompt's answer may fit behind a prompt."""
        finish(tokens[0], tokenizer.eos_token_id)
        return reason_to_skip(tokens[0][1], max_len) or tokens

    whole = SampleStore()
    desirable = build_samples(
        whole, rows, read, fit, tokenizer, max_len=max_len, bad_rows=bad_rows, unit="answer"
    )
    _tell_classes(desirable, label_key)
    store = _with_mismatched(whole, max_len, seed, input_key)
    return store.with_labels(desirable=np.array(desirable))


def _label(row: Row, column: str) -> bool:
    label = read_number(row, column)
    if isinstance(label, bool | int | float) and label in (0, 1):
        return bool(label)
    raise BadRow(f"column {column!r} is {label!r} ({kind(label)}), not true, false, 1 or 0.")


def _tell_classes(desirable: Sequence[bool], label_key: str) -> None:
    num_good = sum(desirable)
    if num_good in (0, len(desirable)):
        logger.warning(
            "--data.label_key %s: all %d answers are %s; KTO learns from the difference between good and bad",
            label_key,
            len(desirable),
            "good" if num_good else "bad",
        )


def _with_mismatched(whole: SampleStore, max_len: int, seed: int, input_key: str) -> UnpairedDataset:
    """Returns, for each sample, the sample and its prompt with another prompt's answer, both truncated at
    max_len."""
    arrays = whole.arrays()
    splits = arrays["starts"][1:-1]
    token_ids, masks = (np.split(arrays[name], splits) for name in ("token_ids", "action_mask"))
    borders = [int(mask.argmax()) for mask in masks]
    prompts: dict[bytes, int] = {}
    numbers = [
        prompts.setdefault(ids[:border].tobytes(), len(prompts))
        for ids, border in zip(token_ids, borders, strict=True)
    ]
    if len(prompts) == 1:
        raise UsageError(
            ErrorCode.INVALID_ROW,
            f"all {len(whole)} rows have the same prompt. KTO estimates how far the policy\nis from the "
            "reference on each prompt with the answer to another one, so it needs at least two prompts.",
            flag="--data.input_key",
            value=input_key,
        )
    store = UnpairedDataset()
    store.skipped, store.needed_len, store.truncated = whole.skipped, whole.needed_len, whole.truncated
    for i, other in enumerate(other_prompts(np.array(numbers), seed).tolist()):
        for answer in (i, other):
            sequence, mask = (
                np.concatenate([x[i][: borders[i]], x[answer][borders[answer] :]])[:max_len]
                for x in (token_ids, masks)
            )
            store.append(sequence.tolist(), mask.astype(bool).tolist())
    return store


def other_prompts(prompts: np.ndarray, seed: int) -> np.ndarray:
    """Returns (n,) for each row a random row whose prompt differs.

    prompts: (n,) number of each row's prompt, at least two distinct ones. Every row is chosen once, unless
    one prompt has more than half of the rows.
    """
    rng = np.random.default_rng(seed)
    count = len(prompts)
    shuffled = rng.permutation(count)
    prompts_shuffled = rng.permutation(prompts.max() + 1)[prompts][shuffled]
    order = shuffled[np.argsort(prompts_shuffled, kind="stable")]  # rows of a prompt are adjacent
    sizes = np.bincount(prompts_shuffled)
    sizes = sizes[sizes > 0]
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)  # first place of each row's prompt
    place = np.arange(count) - first
    largest = sizes.max()
    others = np.empty(count, dtype=np.int64)
    others[order] = order[(first + largest + place % (count - largest)) % count]
    return others
