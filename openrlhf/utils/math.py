"""Boxed answers: openrlhf/rewards/math.py under the name that users' files import."""

from openrlhf.rewards.math import (
    extract_boxed_answer,
    grade_answer,
)

__all__ = [
    "extract_boxed_answer",
    "grade_answer",
]
