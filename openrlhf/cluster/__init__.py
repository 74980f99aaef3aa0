"""Ray, and only Ray."""

import os

from openrlhf import heap

# Ray reads it when it is imported. vLLM says this before it reads its own settings.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^Triton is installed")
heap.grow()
