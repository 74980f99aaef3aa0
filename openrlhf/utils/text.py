"""Converts between texts and tokens, for users' files. Defined in openrlhf/text.py."""

from openrlhf.text import decode as decode
from openrlhf.text import prompt_token_ids as prompt_token_ids
