"""Builds prompts for RL and evaluation from rows."""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import tee
from pathlib import PurePath
from typing import overload

from transformers import PreTrainedTokenizerBase

from openrlhf.data.bad_rows import BadRow, BadRowAction, check_embedded, read_each, read_value, refuse
from openrlhf.data.encode import blocks, check_left
from openrlhf.data.files import PACKED, Row, has_rows
from openrlhf.data.image_rows import ImageColumn
from openrlhf.data.prompt_sampler import PromptDataset
from openrlhf.data.sources import Rows
from openrlhf.data.templates import PromptTemplate, as_messages, check_media, read_tools
from openrlhf.errors import ErrorCode
from openrlhf.text import first_token_ids, with_first
from openrlhf.types import Image, Prompt


def build_prompts(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_key: str,
    label_key: str | None,
    apply_chat_template: bool,
    input_template: str | None,
    max_len: int,
    bad_rows: BadRowAction | None = None,
    source: str = "default",
    first_id: int = 0,
    images: ImageColumn | None = None,
    tools_key: str | None = None,
    by_task: bool = False,
    missing: Mapping[int, str] = {},
) -> PromptDataset:
    """Builds one prompt from each row; its id is `first_id` plus the number of the row, so ids do not depend
    on which other rows are skipped. Its source is the row's `datasource` column, else `source`; `by_task`: in
    the form of a task's name, with "_" for what is no letter, digit or underscore.

    A row is bad when its prompt or label is missing or null, or when the chat template refuses it. A prompt
    of max_len tokens or more leaves no room for a response. bad_rows None: bad rows are an error, and prompts
    that are too long are skipped and counted; "error" and "skip" apply to both. The label keeps the type it
    has in the file.

    tools_key: the column of the rows' tools, which the chat template lists.
    images: the column of the rows' images, if any; needs a chat template, which writes one placeholder for
    each. The length of a prompt counts all tokens of its images.
    missing: tokens without an embedding, which make a row bad, see `missing_embeddings`.
    """
    template = PromptTemplate(tokenizer, apply_chat_template, input_template)

    def read(row: Row) -> Prompt:
        value = read_value(row, input_key, str, list)
        tools = read_tools(row, tools_key) if apply_chat_template else None
        if apply_chat_template:
            check_media(value := as_messages(value), has_images=images is not None)
        if images is not None:
            value = images.place(row, as_messages(value))
        name = str(row.get("datasource") or source)
        return Prompt(
            prompt_id=0,
            text=template(value, tools),
            label="" if label_key is None else read_value(row, label_key),
            source=re.sub(r"\W+", "_", name) if by_task else name,
            messages=as_messages(value) if apply_chat_template else None,
            tools=tools,
        )

    policy = bad_rows or "error"
    skipped: Counter[str] = Counter()
    kept, needed_len = _Kept(rows, read, first_id), 0
    prompts, to_encode = tee(read_each(rows, read, policy, skipped))
    texts = (prompt.text for _, prompt in to_encode)
    encoded = encode_prompts(texts, tokenizer, is_chat=apply_chat_template)
    for (i, prompt), token_ids in zip(prompts, encoded, strict=True):
        try:
            check_embedded(token_ids, missing)
            length, seen = _with_images(images, rows, i, policy, token_ids)
        except BadRow as reason:
            refuse(rows, i, reason, policy, skipped)
            continue
        if 0 < length < max_len:
            kept.append(i, replace(prompt, prompt_id=first_id + i, images=seen, num_tokens=length))
        elif length and bad_rows is None:
            skipped[LONG_PROMPT] += 1
            needed_len = max(needed_len, length + 1)
        else:
            room = f"--data.max_len {max_len} leaves room for 1 to {max_len - 1}"
            reason = BadRow(f"the prompt has {length} tokens; {room}.", ErrorCode.TOO_LONG)
            refuse(rows, i, reason, policy, skipped)
    dataset = PromptDataset(kept, skipped, needed_len)
    if images is not None:
        read_images = images.reader(rows)
        dataset.read_images_with(lambda prompt: read_images(prompt.prompt_id - first_id))
    check_left(dataset, rows, max_len, unit="prompt")
    return dataset


class _Kept(Sequence[Prompt]):
    """A sequence of prompts. Beyond `IN_MEMORY` characters each prompt is built from its row again on access,
    so that a dataset may be larger than memory; prompts held in memory do not change when their file does."""

    def __init__(self, rows: Rows, read: Callable[[Row], Prompt], first_id: int) -> None:
        self._rows, self._read, self._first_id = rows, read, first_id
        self._numbers, self._lengths = array("q"), array("i")
        self._images: dict[int, tuple[Image, ...]] = {}
        """Row number -> the images by name, for rows that have some."""
        self._held: list[Prompt] | None = []
        self._size = 0

    def append(self, number: int, prompt: Prompt) -> None:
        """Appends a prompt. `number`: its row number."""
        self._numbers.append(number)
        self._lengths.append(prompt.num_tokens)
        if prompt.images:
            self._images[number] = prompt.images
        self._size += len(prompt.text)
        if self._size > IN_MEMORY:
            self._held = None
        elif self._held is not None:
            self._held.append(prompt)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, i: int) -> Prompt: ...
    @overload
    def __getitem__(self, i: slice) -> list[Prompt]: ...
    def __getitem__(self, i: int | slice) -> Prompt | list[Prompt]:
        if isinstance(i, slice):
            return [self[prompt] for prompt in range(len(self))[i]]
        if self._held is not None:
            return self._held[i]
        number = self._numbers[i]
        images = self._images.get(number, ())
        prompt = self._read(self._rows[number])
        own = {"prompt_id": self._first_id + number, "images": images, "num_tokens": self._lengths[i]}
        return replace(prompt, **own)


IN_MEMORY = 2**26
"""Characters of all prompts up to which they are held in memory."""


def _with_images(
    images: ImageColumn | None, rows: Rows, i: int, policy: BadRowAction, token_ids: list[int]
) -> tuple[int, tuple[Image, ...]]:
    """Returns the number of tokens of row i including images, and its images by name; `token_ids` are those
    of its text."""
    if images is None:
        return len(token_ids), ()
    headers = images.headers(rows, i, policy)
    ((whole, _),) = images.expand(headers, [(token_ids, [False] * len(token_ids))])
    return len(whole), tuple(Image(header.reference, b"") for header in headers)


def encode_prompts(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, is_chat: bool
) -> Iterator[list[int]]:
    """Yields `prompt_token_ids` of each text."""
    first = [] if is_chat else first_token_ids(tokenizer)
    for block in blocks(texts):
        for token_ids in tokenizer(block, add_special_tokens=False)["input_ids"]:
            yield with_first(token_ids, first)


LONG_PROMPT = "prompt of max_len tokens or more (answers need room beyond it)"


def source_names(items: Sequence[str]) -> list[str]:
    """Returns the source name of each dataset for prompts whose rows have none: "default" for a single
    dataset, else the last part of each path or hub name without the file's ending, with as many parts before
    it as make all names distinct: a/test.jsonl,b/test.jsonl are a_test and b_test. A dataset that is named
    twice gets numbers."""
    if len(items) <= 1:
        return ["default"] * len(items)
    parts = [_name_parts(item) for item in items]
    for depth in range(1, 1 + max(map(len, parts))):
        names = ["_".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return ["_".join([*part[-1:], str(i)]) for i, part in enumerate(parts, start=1)]


def _name_parts(item: str) -> list[str]:
    path = PurePath(item)
    if has_rows(path):
        path = PurePath(item.removesuffix(PACKED)).with_suffix("")
    return [re.sub(r"\W+", "_", part).strip("_") for part in path.parts if part.strip("./~")]
