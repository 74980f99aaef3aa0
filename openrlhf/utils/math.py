"""Extracts and compares boxed answers, for users' files. Defined in openrlhf/rewards/math.py."""

from openrlhf.rewards.math import extract_boxed_answer as extract_boxed_answer
from openrlhf.rewards.math import grade_answer as grade_answer
