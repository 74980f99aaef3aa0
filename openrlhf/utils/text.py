"""Tokens as the text that they are."""

from collections.abc import Sequence
from itertools import takewhile
from operator import eq


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
    is_kept = whole.startswith(before)
    start = len(before) if is_kept else len([*takewhile(bool, map(eq, before, whole))])  # of what differs
    return whole[start:]
