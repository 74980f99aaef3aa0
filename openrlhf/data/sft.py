"""Builds supervised samples from rows: the tokens to read, and which of them to learn."""

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from openrlhf.data.answers import AnswerColumns
from openrlhf.data.bad_rows import BadRowAction, read_value
from openrlhf.data.encode import Text, build_samples, finish, reason_to_skip, truncated
from openrlhf.data.files import Row
from openrlhf.data.image_rows import ImageColumn
from openrlhf.data.sources import Rows
from openrlhf.data.store import SampleStore, Skip, Tokens
from openrlhf.data.templates import PromptTemplate
from openrlhf.data.verify_answers import CHECKED, check_learned


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
    bad_rows: BadRowAction = "error",
    images: ImageColumn | None = None,
    verify: bool = True,
    tools_key: str | None = None,
) -> SampleStore:
    """Builds one sample from each row that has something to learn.

    pretrain           `input_key` is plain text; loss on every token but the first, no end-of-sequence token.
    no chat template   input_template.format(input) is the prompt, `output_key` the response.
    chat template      A text is one user message, lists of messages are used as they are. `output_key` adds
                       the reply; without it the last message is the reply. Loss on the assistant messages of
                       the reply; with `multiturn`, on those of the whole conversation. A turn is learned with
                       the token by which the template ends it, because the policy must learn to stop.

    Where the response does not end with the end-of-sequence token, that token is appended. A sample of more
    than max_len tokens is truncated and gets no end-of-sequence token, because its text did not end. Rows
    without a token to learn, or with a prompt of max_len - 2 tokens or more, are skipped and counted.

    images: the column of the rows' images, if any; needs a chat template. Each image takes as many tokens of
    the text as the model reads of it, none of which is learned. A sample in which an image would be truncated
    is skipped.

    tools_key: the column of the tools that the chat template lists.
    verify: check the learned tokens of the first samples, see `check_learned`.

    Raises UsageError for a bad row (see `read_each`), such as one with an assistant turn that the template
    renders differently once other messages follow, and when no sample is left.
    """
    store = SampleStore()
    columns = None
    if not pretrain:
        template = PromptTemplate(tokenizer, apply_chat_template, input_template)
        options = {"multiturn": multiturn, "images": images, "tools_key": tools_key}
        columns = AnswerColumns.of(template, input_key, output_key, **options)
    texts = columns or partial(_pretrain_text, input_key=input_key)

    def fit(i: int, tokens: list[Tokens], _: None) -> Sequence[Tokens] | Skip:
        (sample,) = tokens
        finish(sample, None if pretrain else tokenizer.eos_token_id)
        if skip := reason_to_skip(sample[1], None if pretrain else max_len):
            return skip
        if columns and verify and len(sample[0]) <= max_len and len(store) < CHECKED:
            check_learned(rows, i, sample, columns, tokenizer)
        return [truncated(sample, max_len)]

    read = lambda row: (texts(row), None)
    build_samples(store, rows, read, fit, tokenizer, max_len=max_len, bad_rows=bad_rows, images=images)
    return store


def _pretrain_text(row: Row, input_key: str) -> tuple[Text]:
    text = read_value(row, input_key, str)
    return (Text(text=text, spans=((0, len(text)),) if text.strip() else ()),)
