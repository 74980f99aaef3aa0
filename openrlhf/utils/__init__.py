"""Names that users' own files import. Nothing here imports torch: reward functions have own processes."""

from openrlhf.rewards.math import extract_boxed_answer, grade_answer
from openrlhf.text import decode, prompt_token_ids

__all__ = ["decode", "extract_boxed_answer", "grade_answer", "prompt_token_ids"]
