"""Names that users' own files import. No torch is imported here: reward functions have their own processes."""

from openrlhf.rewards.math import extract_boxed_answer, grade_answer
from openrlhf.text import decode, prompt_token_ids

__all__ = ["decode", "extract_boxed_answer", "grade_answer", "prompt_token_ids"]
