"""Names that users' own files import. Nothing here imports torch, which reward processes do without."""

from openrlhf.rewards.math import extract_boxed_answer, grade_answer
from openrlhf.text import decode, prompt_token_ids

__all__ = ["decode", "extract_boxed_answer", "grade_answer", "prompt_token_ids"]
