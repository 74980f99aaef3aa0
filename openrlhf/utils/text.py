"""Tokens as the text that they are."""

from collections.abc import Sequence


def decode(
    tokenizer, token_ids: Sequence[int], *, after: Sequence[int] = (), skip_special_tokens: bool = False
) -> str:
    """What `token_ids` add to the text of the tokens `after` which they stand: decode(all) minus
    decode(after), without any cleaning of spaces.

    Alone they may say something else: Llama 2's decoder drops the space before the first word of a text.
    Where `after` ends within a character, the text begins with the whole character.
    """

    def text(ids: Sequence[int]) -> str:
        return tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    before, whole = text(after), text([*after, *token_ids])
    for known in (before, before.rstrip(_REPLACEMENT)):
        if whole.startswith(known):
            return whole[len(known) :]
    return text(token_ids)  # they make bytes of `after` invalid, as a decoder with byte tokens sees it


_REPLACEMENT = "\ufffd"
