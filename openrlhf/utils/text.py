"""Texts and tokens: openrlhf/text.py under the name that users' files import."""

from openrlhf.text import (
    decode,
    prompt_token_ids,
)

__all__ = [
    "decode",
    "prompt_token_ids",
]
