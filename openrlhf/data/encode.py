"""Tokenises texts and marks which tokens the model learns."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerBase

from openrlhf.data.bad_rows import BadRow, BadRowAction, read_each, refuse
from openrlhf.data.files import Row
from openrlhf.data.sources import Rows
from openrlhf.data.store import Samples, Skip, Tokens
from openrlhf.errors import ErrorCode, UsageError, counted
from openrlhf.text import decode, first_token_ids, with_first

if TYPE_CHECKING:
    from openrlhf.data.image_rows import ImageColumn

ItemT = TypeVar("ItemT")
LabelT = TypeVar("LabelT")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    text: str
    spans: tuple[tuple[int, int], ...] = ()
    """Spans of characters to learn: [start, end) in ascending order. Empty: nothing to learn."""
    ends: tuple[int, ...] = ()
    """Character positions, in ascending order, at which a step ends: the last token before each is marked.
    Not used together with spans."""
    is_chat: bool = False
    """True where a chat template wrote the text with its special tokens, so none are prepended."""

    @property
    def borders(self) -> list[int]:
        """Character positions that no token may span."""
        return [border for span in self.spans for border in span] + [*self.ends]


def build_samples(
    store: Samples,
    rows: Rows,
    read: Callable[[Row], tuple[tuple[Text, ...], LabelT]],
    fit: Callable[[int, list[Tokens], LabelT], Sequence[Tokens] | Skip],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_len: int,
    bad_rows: BadRowAction,
    images: "ImageColumn | None" = None,
    unit: str = "sample",
) -> list[LabelT]:
    """Appends the samples of each usable row to `store`. Returns the labels of the rows that gave some.

    read: row -> its texts, and its label.
    fit: (number of the row, tokens of its texts, label) -> its samples, truncated at max_len, or the reason
        why it gives none.

    Rows that `read` or `fit` refuses by BadRow, or whose images cannot be used, are handled as in
    `read_each`. Each image of a row takes as many tokens of a text as the model reads of it; a row of which
    an image would be truncated is skipped. Raises UsageError when no row is left.
    """
    encode, labels = Encoder(tokenizer), []
    for block in blocks(read_each(rows, read, bad_rows, store.skipped)):
        encoded = iter(encode([text for _, (texts, _) in block for text in texts]))
        for i, (texts, label) in block:
            tokens = list(islice(encoded, len(texts)))
            try:
                if images is not None:
                    tokens = images.expand(images.headers(rows, i, bad_rows), tokens)
                samples = fit(i, tokens, label)
            except BadRow as reason:
                refuse(rows, i, reason, bad_rows, store.skipped)
                continue
            longest = max(len(token_ids) for token_ids, _ in tokens)
            if not isinstance(samples, Skip) and images is not None:
                patch = images.layout.patch
                if any(patch in token_ids[max_len:] for token_ids, _ in tokens):
                    samples = Skip(CUT_IMAGE, longest)
            if isinstance(samples, Skip):
                store.skip(samples, longest)
                continue
            if longest > max_len:
                store.truncate(longest)
            for token_ids, action_mask in samples:
                store.append(token_ids, action_mask, None if images is None else i)
            labels.append(label)
    check_left(store, rows, max_len, unit)
    return labels


class Encoder:
    """A tokenizer that maps each token to its place in the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._first = first_token_ids(tokenizer)
        self._encoder = _whole_token_encoder(tokenizer) if tokenizer.is_fast else None

    def __call__(self, texts: Iterable[Text]) -> Iterator[Tokens]:
        """Yields the tokens of each text. The part before a text's first span is tokenised as if it stood
        alone, and no token crosses the border of a span. A text without a chat template begins with the
        tokens that the tokenizer prepends to a text."""
        for block in blocks(texts):
            encoded = (
                (_encode_slow(text, self._tokenizer) for text in block)
                if self._encoder is None
                else _encode_fast(block, self._tokenizer, self._encoder)
            )
            for text, (token_ids, learned) in zip(block, encoded, strict=True):
                whole = token_ids if text.is_chat else with_first(token_ids, self._first)
                yield whole, [False] * (len(whole) - len(token_ids)) + learned


def blocks(items: Iterable[ItemT], size: int = 1000) -> Iterator[list[ItemT]]:
    """Splits items into blocks; the tokenizer encodes the texts of a block in parallel."""
    left = iter(items)
    while block := list(islice(left, size)):
        yield block


def _encode_fast(
    texts: Sequence[Text], tokenizer: PreTrainedTokenizerBase, encoder: Tokenizer
) -> Iterator[Tokens]:
    encoded = encoder.encode_batch([text.text for text in texts], add_special_tokens=False)
    prompts = [text.text[: text.spans[0][0]] if text.spans else "" for text in texts]
    encoded_prompts = encoder.encode_batch(prompts, add_special_tokens=False)
    for text, whole, prompt in zip(texts, encoded, encoded_prompts, strict=True):
        token_ids, prompt_ids = whole.ids, prompt.ids
        begins, ends = np.array(whole.offsets, dtype=np.int64).reshape(-1, 2).T
        crossed = any(((begins < border) & (border < ends)).any() for border in text.borders)
        if crossed or token_ids[: len(prompt_ids)] != prompt_ids:
            yield _encode_pieces(text, tokenizer)
            continue
        learned = np.zeros(len(token_ids), dtype=np.bool_)
        for start, end in text.spans:
            learned |= (begins >= start) & (ends <= end)
        last = np.searchsorted(ends, np.array(text.ends, dtype=np.int64), side="right") - 1
        learned[last[np.isin(text.ends, ends)]] = True
        yield token_ids, learned.tolist()


def _whole_token_encoder(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Returns the tokenizer with full token offsets. Many post-processors leave the space before a word out
    of its offsets and give whitespace-only tokens no width, so that indentation would not be learned."""
    encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    encoder.post_processor = processors.ByteLevel(trim_offsets=False)
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _encode_pieces(text: Text, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenises prompts and replies, or steps, separately, as a policy meets them: no token crosses a
    border."""
    token_ids: list[int] = []
    learned: list[bool] = []
    for i, (start, end) in enumerate(pairwise([0, *text.borders, len(text.text)])):
        piece = tokenize_text(text.text[start:end], tokenizer) if start < end else []
        token_ids += piece
        learned += [not text.ends and i % 2 == 1] * len(piece)
        if piece and end in text.ends:
            learned[-1] = True
    return token_ids, learned


def _encode_slow(text: Text, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenises the pieces of a text separately, since a slow tokenizer has no offsets. Raises UsageError
    where the pieces decode to another text than the whole."""
    token_ids, learned = _encode_pieces(text, tokenizer)
    if decode(tokenizer, token_ids) != decode(tokenizer, tokenize_text(text.text, tokenizer)):
        raise UsageError(
            ErrorCode.UNSUPPORTED,
            "the slow tokenizer of this model cannot find the boundary of prompt and reply: a text that is\n"
            "tokenised in pieces decodes to another text. Remove the flag.",
            flag="--data.disable_fast_tokenizer",
        )
    return token_ids, learned


def tokenize_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def finish(tokens: Tokens, eos: int | None) -> None:
    """Appends the end-of-sequence token (None: none) to an answer that reaches the end of the text without
    it. The first token is never learned, because nothing predicts it."""
    token_ids, learned = tokens
    if eos is not None and token_ids and learned[-1] and token_ids[-1] != eos:
        token_ids.append(eos)
        learned.append(True)
    if learned:
        learned[0] = False


def reason_to_skip(learned: Sequence[bool], max_len: int | None) -> Skip | None:
    """Returns the reason to drop a sample, or None to keep it. max_len: None if a text need not leave room
    for an answer."""
    if True not in learned:
        return Skip(NOTHING_TO_LEARN)
    if max_len is not None and (prompt := learned.index(True)) >= max_len - 2:
        return Skip(LONG_PROMPT, prompt + 3)
    return None


def truncated(tokens: Tokens, max_len: int) -> Tokens:
    token_ids, learned = tokens
    return token_ids[:max_len], learned[:max_len]


CUT_IMAGE = "image cut at max_len"
NOTHING_TO_LEARN = "nothing to learn (empty prompt or answer)"
LONG_PROMPT = "prompt of max_len - 2 tokens or more"


class Kept(Sized, Protocol):
    """Items built from rows, with counts of the rows that were truncated or skipped: see `Samples`."""

    skipped: Counter[str]
    truncated: int
    needed_len: int


def check_left(kept: Kept, rows: Rows, max_len: int, unit: str = "sample") -> None:
    """Raises UsageError when no row is left."""
    if not len(kept):
        text = f"no {unit} is left of {counted(len(rows), 'row')}: {_reasons(kept)}{_remedy(kept)}."
        raise UsageError(ErrorCode.NO_ROWS, f"{text}\n--data.max_len is {max_len}.", value=rows.place(0)[0])


def log_skipped(kept: Kept, flag: str, room: int | None = None) -> None:
    """Logs, in the first process, how many rows of `flag` are skipped and how many are truncated. room: the
    maximum number of tokens that the models read."""
    skipped, lost = kept.skipped.total(), []
    if skipped:
        lost.append(f"{skipped:,} were dropped ({_reasons(kept)})")
    if kept.truncated:
        lost.append(f"{kept.truncated:,} were truncated at --data.max_len")
    if lost and os.environ.get("RANK", "0") == "0":
        num_rows = f"{len(kept) + skipped:,}"
        logger.warning("%s: of %s rows %s%s", flag, num_rows, ", ".join(lost), _remedy(kept, room))


def _reasons(kept: Kept) -> str:
    return ", ".join(f"{count:,} × {reason}" for reason, count in kept.skipped.items())


def _remedy(kept: Kept, room: int | None = None) -> str:
    if not kept.needed_len:
        return ""
    limit = f", but the model reads at most {room}" if room and room < kept.needed_len else ""
    return f";\n--data.max_len {kept.needed_len} would keep every row whole{limit}"
