"""Everything that uses Ray: placement of engines and models, their actors, and calls to them. No other folder
imports Ray."""

import os

from openrlhf import heap

# Ray reads this variable when imported. vLLM prints this line before it reads its log settings.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^Triton is installed")
heap.grow()
