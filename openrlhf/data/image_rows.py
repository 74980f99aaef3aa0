"""Places the images of rows in a conversation and expands their placeholder tokens."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from openrlhf.data.bad_rows import BadRow, BadRowAction, ReadT, at_row
from openrlhf.data.cache import digest
from openrlhf.data.files import Row
from openrlhf.data.images import ImageHeader, ImageSources, image_header, image_identity, load_image
from openrlhf.data.sources import Rows
from openrlhf.data.store import Tokens
from openrlhf.data.templates import Message, render_messages
from openrlhf.errors import ErrorCode, UsageError, first_line
from openrlhf.hub import model_folder
from openrlhf.text import IMAGE_TAG, ImageLayout, image_layout, patch_counts
from openrlhf.types import Image

PART = {"type": "image"}
"""Message part that a chat template renders as an image placeholder."""
IMAGES_FLAG = "--data.max_images_per_prompt"


def find_layout(processor: Any, tokenizer: PreTrainedTokenizerBase) -> ImageLayout:
    """Returns the tokens of a model's images: the chat template writes one placeholder, which the processor
    expands. Raises UsageError if the chat template renders no images, or the processor expands them in an
    unsupported way."""
    _check_template(tokenizer, processor.image_token)
    try:
        return image_layout(processor)
    except ValueError as reason:
        raise UsageError(
            ErrorCode.UNSUPPORTED,
            f"{reason}.\nOther processors are not supported. Use a model of Qwen's or Gemma's families.",
            flag=IMAGES_FLAG,
        ) from reason


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageColumn:
    """A column with images, the sources that they may come from, and the image tokens of the model."""

    key: str
    max_images: int
    root: str | None
    """Folder of image paths. None: the folder of each file of rows."""
    hosts: tuple[str, ...]
    processor: Any
    layout: ImageLayout
    """Tokens of the model's images."""

    @classmethod
    def of(cls, data: Any, path: str, flag: str, tokenizer: PreTrainedTokenizerBase) -> "ImageColumn | None":
        """Builds the column from the flags `data`, for the model at `path`, named by `flag`; None where rows
        have no images."""
        if not data.reads_images:
            return None
        processor = load_processor(path, flag)
        return cls(
            key=data.image_key,
            max_images=data.max_images_per_prompt,
            root=data.image_root,
            hosts=data.image_hosts or (),
            processor=processor,
            layout=find_layout(processor, tokenizer),
        )

    def values(self, row: Row) -> list[Any]:
        """Returns the row's images as a list, which may be empty. Raises BadRow if there are more than
        `max_images`."""
        value = row.get(self.key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if len(values) > self.max_images:
            raise BadRow(
                f"column {self.key!r} has {len(values)} images; "
                f"--data.max_images_per_prompt {self.max_images} allows fewer."
            )
        return values

    def place(self, row: Row, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages with an image part for each image of the row."""
        return place_images(messages, len(self.values(row)), self.key)

    def headers(self, rows: Rows, i: int, policy: BadRowAction) -> list[ImageHeader]:
        """Returns the headers of the images of row i. With "skip" the images are decoded whole, because a row
        cannot be skipped later. Raises BadRow."""
        if policy == "skip":
            self._each(rows, i, load_image)
        return self._each(rows, i, image_header)

    def expand(self, headers: Sequence[ImageHeader], texts: Sequence[Tokens]) -> list[Tokens]:
        """Expands the placeholders in each text of a row; each text shows all images of the row. Raises
        BadRow if a text's placeholders do not match the number of images, or the processor refuses an
        image."""
        sizes = [(header.height, header.width) for header in headers]
        try:
            counts = patch_counts(self.processor, sizes) if sizes else []
        except ValueError as refusal:  # raised for an image's shape
            raise BadRow(f"column {self.key!r}: the processor refuses an image: {refusal}.") from refusal
        for token_ids, _ in texts:
            found = token_ids.count(self.layout.placeholder)
            if found != len(counts):
                raise BadRow(
                    f"the text has {found} image placeholders, and the row has {len(counts)} images."
                )
        return [self._expanded(text, counts) for text in texts]

    def _expanded(self, text: Tokens, counts: Sequence[int]) -> Tokens:
        """Replaces each placeholder by the tokens of its image, none of which is learned."""
        token_ids, learned = text
        whole, places = self.layout.expanded(token_ids, counts)
        return whole, [place >= 0 and learned[place] for place in places]

    def reader(self, rows: Rows) -> Callable[[int], tuple[Image, ...]]:
        """Returns a function from a row number to its images, which are read from their source."""
        return partial(self._read, rows)

    def _read(self, rows: Rows, i: int) -> tuple[Image, ...]:
        try:
            return tuple(self._each(rows, i, load_image))
        except BadRow as reason:
            raise at_row(rows, i, reason) from reason

    def digest(self, rows: Rows) -> str:
        """Returns a digest that changes with the processor's settings and with any image: its name, the size
        of its file, or the time of its last change."""
        images = [self._identities(rows, i) for i in range(len(rows))]
        settings = self.processor.image_processor.to_json_string()
        return digest([self.key, self.max_images, settings, images])

    def _identities(self, rows: Rows, i: int) -> list[Any]:
        try:
            return self._each(rows, i, image_identity)
        except BadRow as reason:
            return [reason.text]

    def _each(self, rows: Rows, i: int, read: Callable[[Any, ImageSources], ReadT]) -> list[ReadT]:
        """Returns what `read` returns for each image of row i. Raises BadRow."""
        values = self.values(rows[i])
        sources = ImageSources(
            root=rows.folder(i) if self.root is None else Path(self.root), hosts=self.hosts
        )
        try:
            return [read(value, sources) for value in values]
        except ValueError as reason:
            raise BadRow(f"column {self.key!r}: {reason}") from reason


def load_auto_processor(path: str) -> Any:
    """Loads a model's processor. Its class is loaded when it is used: it imports torchvision, which takes
    seconds."""
    return transformers.AutoProcessor.from_pretrained(model_folder(path), trust_remote_code=False)


def load_processor(path: str, flag: str) -> Any:
    error = partial(UsageError, ErrorCode.INVALID_MODEL, flag=flag, value=path)
    try:
        processor = load_auto_processor(path)
    except (OSError, ValueError) as reason:
        raise error(f"the model has no image processor: {first_line(reason)}") from reason
    if not hasattr(processor, "image_processor"):
        raise error(f"the model does not support images; remove {IMAGES_FLAG}.")
    return processor


def place_images(messages: Sequence[Message], num_images: int, key: str) -> list[Message]:
    """Replaces each `IMAGE_TAG` in the messages' texts by `PART`; without any tag the images come before the
    text of the first user message. Raises BadRow if the number of places and of images differ."""
    placed = [_with_parts(message) for message in messages]
    places = sum(part.get("type") == "image" for m in placed for part in _parts(m.get("content")))
    if num_images and not places:
        return _before_first_text(placed, num_images)
    if places != num_images:
        raise BadRow(
            f"the messages have {places} image placeholders ({IMAGE_TAG}), and column {key!r} has "
            f"{num_images} images."
        )
    return placed


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    has_tags = isinstance(content, str) and IMAGE_TAG in content
    return {**message, "content": _parts(content)} if has_tags else message


def _parts(content: Any) -> list[Any]:
    """Returns the parts of a content. A text has an image part for each `IMAGE_TAG`."""
    if not isinstance(content, str):
        return content if isinstance(content, list) else []
    texts = filter(None, re.split(f"({IMAGE_TAG})", content))
    return [dict(PART) if text == IMAGE_TAG else {"type": "text", "text": text} for text in texts]


def _before_first_text(messages: Sequence[Message], num_images: int) -> list[Message]:
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise BadRow(f"no message has the role user, and none has a place for the images ({IMAGE_TAG}).")
    content = [*(dict(PART) for _ in range(num_images)), *_parts(messages[first]["content"])]
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


def _check_template(tokenizer: PreTrainedTokenizerBase, image_token: str) -> None:
    message = {"role": "user", "content": [PART, {"type": "text", "text": "?"}]}
    try:
        shown = render_messages([message], tokenizer, add_generation_prompt=True)
    except BadRow as refusal:
        shown = str(refusal)
    if shown.count(image_token) != 1:
        raise UsageError(
            ErrorCode.CHAT_TEMPLATE,
            f"the chat template of {tokenizer.name_or_path} writes no {image_token}\nfor an image in a "
            "message. Give a template that does with --data.tokenizer_chat_template.",
            flag=IMAGES_FLAG,
        )
