"""Functions for users' own files. No import here loads torch, so reward processes start without it."""

from openrlhf.rewards.math import extract_boxed_answer as extract_boxed_answer
from openrlhf.rewards.math import grade_answer as grade_answer
from openrlhf.rewards.math import grade_response as grade_response
from openrlhf.text import decode as decode
from openrlhf.text import prompt_token_ids as prompt_token_ids
