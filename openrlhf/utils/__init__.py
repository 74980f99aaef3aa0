"""What users' own files import. Nothing here imports torch: reward functions have processes of their own."""

from openrlhf.utils.math import extract_boxed_answer, grade_answer

__all__ = ["extract_boxed_answer", "grade_answer"]
