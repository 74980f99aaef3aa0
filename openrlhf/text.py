"""Tokens as the text that they are, and prompts as tokens, also where an image stands for some."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from transformers import PreTrainedTokenizerBase


def prompt_token_ids(tokenizer: "PreTrainedTokenizerBase", prompt: str, *, is_chat: bool) -> list[int]:
    """A prompt as a policy reads it. Plain text begins with what the tokenizer puts in front of a text, as
    with transformers. `is_chat`: a chat template wrote it, special tokens and all, and nothing is added."""
    token_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return token_ids if is_chat else with_first(token_ids, first_token_ids(tokenizer))


def first_token_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """What the tokenizer puts in front of a text: most often the beginning-of-sequence token, or nothing."""
    alone = tokenizer(_ANY_TEXT, add_special_tokens=False)["input_ids"]
    whole = tokenizer(_ANY_TEXT)["input_ids"]
    starts = (i for i in range(len(whole)) if whole[i : i + len(alone)] == alone)
    return whole[: next(starts, 0)]


_ANY_TEXT = "a"


def token_ids_within(tokenizer: "PreTrainedTokenizerBase", text: str, limit: int) -> list[int]:
    """The tokens of a text. Of one with far more than `limit` those of its beginning, more than `limit` too:
    a tool may say megabytes, and nobody else in the process gets a word in while they are tokenised."""
    start = text[: _CHARACTERS * limit]
    token_ids = tokenizer(start, add_special_tokens=False)["input_ids"]
    if len(start) == len(text) or len(token_ids) > 2 * limit:
        return token_ids
    return tokenizer(text, add_special_tokens=False)["input_ids"]


_CHARACTERS = 16
"""More than most tokens have."""


def with_first(token_ids: list[int], first: list[int]) -> list[int]:
    """`first` in front of tokens that do not begin with it. No tokens stay none."""
    return [*first, *token_ids] if token_ids and token_ids[: len(first)] != first else token_ids


def decode(
    tokenizer: "PreTrainedTokenizerBase",
    token_ids: Sequence[int],
    *,
    after: Sequence[int] = (),
    skip_special_tokens: bool = False,
) -> str:
    """What `token_ids` add to the text of the tokens `after` which they stand: decode(all) minus
    decode(after), without any cleaning of spaces.

    Alone they may say something else: Llama 2's decoder drops the space before the first word of a text.
    Where `after` ends within a character, the text begins with the whole character.
    """

    def text(ids: Sequence[int]) -> str:
        decoded = tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return cast(str, decoded)  # a list only where it gets several texts

    before, whole = text(after), text([*after, *token_ids])
    for known in (before, before.rstrip(_REPLACEMENT)):
        if whole.startswith(known):
            return whole[len(known) :]
    return text(token_ids)  # they make bytes of `after` invalid, as a decoder with byte tokens sees it


def decode_each(
    tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int], *, after: Sequence[int] = ()
) -> list[str]:
    """What each token adds; together they are `decode(token_ids, after=after)`. A character of several tokens
    stands at the last of them."""
    whole, texts = [*after, *token_ids], []
    before, start = 0, len(after)  # the last tokens that are whole characters, and those that follow
    for end in range(start + 1, len(whole) + 1):
        text = decode(tokenizer, whole[start:end], after=whole[before:start])
        is_part = text.endswith(_REPLACEMENT) and end < len(whole) and end - start < _LONGEST_CHARACTER
        texts.append("" if is_part else text)
        if not is_part:
            before, start = start, end
    return texts


def text_tokenizer(tokenizer: Any) -> "PreTrainedTokenizerBase":
    """That of a processor, which is what belongs to a model that reads images."""
    return getattr(tokenizer, "tokenizer", tokenizer) if hasattr(tokenizer, "image_processor") else tokenizer


class ImageLayout(NamedTuple):
    """The tokens that a model reads of an image, in place of the one that its chat template writes."""

    placeholder: int
    patch: int
    """Stands there as often as the image has patches."""
    before: tuple[int, ...]
    after: tuple[int, ...]
    newlines: Mapping[int, int]
    """Tokens that are newlines -> how many. Such tokens melt into one where they meet."""

    def expanded(self, token_ids: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens with those of each image, and for each of them its place in `token_ids`, -1 where an
        image brought it. counts: patches of each image."""
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
    """ValueError where the processor writes images in another way."""
    from PIL import Image

    name = type(processor).__name__
    if not hasattr(processor, "_get_num_multimodal_tokens"):
        raise ValueError(f"{name} does not say how many tokens an image has")
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
            raise ValueError(
                f"{name} does not write an image as one token, as often as the image has patches"
            )
    ((patch, before, after),) = layouts
    newlines = {vocabulary["\n" * n]: n for n in range(1, 32) if "\n" * n in vocabulary}
    return ImageLayout(vocabulary[processor.image_token], patch, before, after, newlines)


def stand_ins(processor: Any) -> tuple[int, ...]:
    """Tokens that stand for what is no text, which a policy must not answer with: that of an image, with
    which an engine is asked, comes first. Gemma 4 reads those of videos and sound as padding."""
    others = (getattr(processor, f"{kind}_token_id", None) for kind in ("video", "audio"))
    layout = image_layout(processor)
    return layout.placeholder, layout.patch, *(token_id for token_id in others if token_id is not None)


def patch_counts(processor: Any, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Of images with these heights and widths."""
    return processor._get_num_multimodal_tokens(image_sizes=list(sizes)).num_image_tokens


def num_tokens_read(processor: Any, token_ids: Sequence[int], images: Sequence["Picture"]) -> int:
    """Of tokens with a placeholder for each image: what a model reads of an image is as many tokens as its
    size makes."""
    if not images:
        return len(token_ids)
    counts = patch_counts(processor, [(image.height, image.width) for image in images])
    return len(image_layout(processor).expanded(token_ids, counts)[0])


def image_data(images: Sequence["Picture"] | None) -> dict | None:
    """As vLLM takes them beside a prompt."""
    return {"image": list(images)} if images else None


IMAGE_TAG = "<image>"


def with_placeholders(processor: Any, text: str, count: int) -> str:
    """`text` with the model's placeholder for each `<image>`; without any, all of them in front of it.
    ValueError where there are not as many as images."""
    if IMAGE_TAG not in text:
        text = IMAGE_TAG * count + text
    if (tags := text.count(IMAGE_TAG)) != count:
        raise ValueError(f"{count} images, and {tags} times {IMAGE_TAG} in the text: {text!r}")
    return text.replace(IMAGE_TAG, placeholder(processor))


def placeholder(processor: Any) -> str:
    """What the chat template writes for an image. ValueError where that is nothing."""
    text = {"type": "text", "text": IMAGE_TAG}
    with_image, without = (
        processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        for parts in ([{"type": "image"}, text], [text])
    )
    written = with_image.partition(IMAGE_TAG)[0].removeprefix(without.partition(IMAGE_TAG)[0])
    if not written:
        raise ValueError("the chat template writes nothing for an image, so the policy cannot be shown any")
    return written


_LONGEST_CHARACTER = 4
"""Bytes, and so tokens."""
_REPLACEMENT = "\ufffd"
