"""Converts prompts to tokens and tokens to text, including prompts with images."""

from collections.abc import Mapping, Sequence
from datetime import date
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from openrlhf.errors import ErrorCode, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from transformers import PreTrainedTokenizerBase

    from openrlhf.types import Trajectory


class Calendar:
    """The date that chat templates write: of the start of the run, also after a resume."""

    today = date.today()


def prompt_token_ids(tokenizer: "PreTrainedTokenizerBase", prompt: str, *, is_chat: bool) -> list[int]:
    """Returns the tokens of a prompt as the policy reads it. Plain text gets the tokenizer's leading special
    tokens, as in transformers. `is_chat`: a chat template has written all special tokens, so none are
    added."""
    token_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return token_ids if is_chat else with_first(token_ids, first_token_ids(tokenizer))


def first_token_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Returns the tokens that the tokenizer puts in front of a text: usually the beginning-of-sequence token,
    or none."""
    alone = tokenizer(_ANY_TEXT, add_special_tokens=False)["input_ids"]
    whole = tokenizer(_ANY_TEXT)["input_ids"]
    starts = (i for i in range(len(whole)) if whole[i : i + len(alone)] == alone)
    return whole[: next(starts, 0)]


_ANY_TEXT = "a"


def token_ids_within(tokenizer: "PreTrainedTokenizerBase", text: str, limit: int) -> list[int]:
    """Returns the tokens of a text. For a text with far more than `limit` tokens, only those of its
    beginning, still more than `limit`: a tool may return megabytes, and tokenising them would block the
    process."""
    start = text[: _CHARACTERS * limit]
    token_ids = tokenizer(start, add_special_tokens=False)["input_ids"]
    if len(start) == len(text) or len(token_ids) > 2 * limit:
        return token_ids
    return tokenizer(text, add_special_tokens=False)["input_ids"]


_CHARACTERS = 16
"""Characters per token that most tokens stay below."""


def with_first(token_ids: list[int], first: list[int]) -> list[int]:
    """Returns the tokens with `first` in front, unless they begin with it already. Empty tokens stay
    empty."""
    return [*first, *token_ids] if token_ids and token_ids[: len(first)] != first else token_ids


def decode(
    tokenizer: "PreTrainedTokenizerBase",
    token_ids: Sequence[int],
    *,
    after: Sequence[int] = (),
    skip_special_tokens: bool = False,
) -> str:
    """Returns the text that `token_ids` add to the preceding tokens `after`: decode(after + token_ids) minus
    decode(after), without any cleaning of spaces.

    Decoded alone they may give another text: Llama 2's decoder drops the space before the first word. If
    `after` ends within a character, the text begins with the whole character.
    """

    def text(ids: Sequence[int]) -> str:
        decoded = tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return cast(str, decoded)  # a list only for a batch of texts

    before, whole = text(after), text([*after, *token_ids])
    for known in (before, before.rstrip(_REPLACEMENT)):
        if whole.startswith(known):
            return whole[len(known) :]
    return text(token_ids)  # for a byte-level decoder they make bytes of `after` invalid


class Decode(Protocol):
    """Decodes token ids that continue other tokens: `decode` with a tokenizer."""

    def __call__(self, token_ids: list[int], /, *, after: list[int]) -> str: ...


def decode_response(trajectory: "Trajectory", decode: Decode) -> str:
    """Returns everything after the prompt, as text."""
    token_ids, start = trajectory.token_ids.tolist(), trajectory.prompt_length
    return decode(token_ids[start:], after=token_ids[:start])


def text_tokenizer(tokenizer: Any) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of a processor (vision-language models have one); a tokenizer unchanged."""
    return getattr(tokenizer, "tokenizer", tokenizer) if hasattr(tokenizer, "image_processor") else tokenizer


class ImageLayout(NamedTuple):
    """Tokens that a model reads for an image, in place of the single placeholder of its chat template."""

    placeholder: int
    patch: int
    """Token repeated once per patch of the image."""
    before: tuple[int, ...]
    after: tuple[int, ...]
    newlines: Mapping[int, int]
    """Token of newlines -> number of newlines. Adjacent ones merge into one token."""

    def expanded(self, token_ids: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the tokens with all image tokens, and for each its index in `token_ids`, -1 for tokens of
        an image. `counts`: patches of each image."""
        whole: list[int] = []
        places: list[int] = []
        left, follows_image = iter(counts), False
        for i, token_id in enumerate(token_ids):
            is_image = token_id == self.placeholder
            new = [*self.before, *[self.patch] * next(left), *self.after] if is_image else [token_id]
            if whole and (is_image or follows_image) and (melted := self._melted(whole[-1], new[0])):
                whole[-1], places[-1], new = melted, -1, new[1:]
            whole += new
            places += [-1 if is_image else i] * len(new)
            follows_image = is_image
        return whole, places

    def _melted(self, token_id: int, next_id: int) -> int | None:
        counts = [self.newlines.get(token_id), self.newlines.get(next_id)]
        if None in counts:
            return None
        total = sum(cast(list[int], counts))
        return next((melted for melted, count in self.newlines.items() if count == total), None)


@cache
def image_layout(processor: Any) -> ImageLayout:
    """Returns the processor's layout of image tokens. Raises UsageError if the processor does not write an
    image as one token per patch, between fixed tokens."""
    from PIL import Image  # users import this module, most of them without images

    name = type(processor).__name__
    if not hasattr(processor, "_get_num_multimodal_tokens"):
        raise UsageError(ErrorCode.UNSUPPORTED, f"{name} does not give the number of tokens of an image")
    vocabulary = processor.tokenizer.get_vocab()
    layouts: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for height, width in ((96, 160), (320, 320)):
        picture = Image.new("RGB", (width, height))
        written = processor(text=[processor.image_token], images=[picture], add_special_tokens=False)
        ids, (count,) = list(written["input_ids"][0]), patch_counts(processor, [(height, width)])
        patch = max(ids, key=ids.count)
        start = ids.index(patch)
        layouts.add((patch, tuple(ids[:start]), tuple(ids[start + count :])))
        if ids[start : start + count] != [patch] * count or ids.count(patch) != count or len(layouts) > 1:
            text = f"{name} does not write an image as one token that is repeated for each patch"
            raise UsageError(ErrorCode.UNSUPPORTED, text)
    ((patch, before, after),) = layouts
    newlines = {vocabulary["\n" * n]: n for n in range(1, 32) if "\n" * n in vocabulary}
    return ImageLayout(vocabulary[processor.image_token], patch, before, after, newlines)


def image_placeholder_ids(processor: Any) -> tuple[int, ...]:
    """Returns the tokens that stand for images, videos or sound, which a policy must not sample. The image
    placeholder of an engine's prompts comes first. Gemma 4 reads the tokens of videos and sound as
    padding."""
    others = (getattr(processor, f"{kind}_token_id", None) for kind in ("video", "audio"))
    layout = image_layout(processor)
    return layout.placeholder, layout.patch, *(token_id for token_id in others if token_id is not None)


def patch_counts(processor: Any, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the number of patches of images with these (height, width) in pixels."""
    return processor._get_num_multimodal_tokens(image_sizes=list(sizes)).num_image_tokens


def num_tokens_read(processor: Any, token_ids: Sequence[int], images: Sequence["Picture"]) -> int:
    """Returns the number of tokens that a model reads for `token_ids` with one placeholder per image; each
    image expands to as many tokens as its size gives."""
    if not images:
        return len(token_ids)
    counts = patch_counts(processor, [(image.height, image.width) for image in images])
    return len(image_layout(processor).expanded(token_ids, counts)[0])


def image_data(images: Sequence["Picture"] | None) -> dict | None:
    """Returns images in the form that vLLM takes beside a prompt; None without images."""
    return {"image": list(images)} if images else None


IMAGE_TAG = "<image>"


def with_placeholders(processor: Any, text: str, count: int) -> str:
    """Returns `text` with each `<image>` replaced by the model's placeholder; a text without any gets `count`
    of them in front. Raises UsageError if the text has tags, but not `count`."""
    if IMAGE_TAG not in text:
        text = IMAGE_TAG * count + text
    if (tags := text.count(IMAGE_TAG)) != count:
        problem = f"{count} images, and {tags} times {IMAGE_TAG} in the text: {text!r}"
        raise UsageError(ErrorCode.INVALID_VALUE, problem)
    return text.replace(IMAGE_TAG, placeholder(processor))


def placeholder(processor: Any) -> str:
    """Returns the text that the chat template writes for an image. Raises UsageError if that is nothing."""
    text = {"type": "text", "text": IMAGE_TAG}
    with_image, without = (
        processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        for parts in ([{"type": "image"}, text], [text])
    )
    written = with_image.partition(IMAGE_TAG)[0].removeprefix(without.partition(IMAGE_TAG)[0])
    if not written:
        problem = (
            "the chat template writes nothing for an image; use one that does: --data.tokenizer_chat_template"
        )
        raise UsageError(ErrorCode.CHAT_TEMPLATE, problem)
    return written


def behind_thoughts(text: str) -> str:
    """Returns the part of an answer that is not thoughts: all behind the last </think>, up to a <think> that
    nothing closes."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


_REPLACEMENT = "\ufffd"
