"""Everything that runs on Ray: placement of engines and models, their actors, and calls to them. No other
folder imports Ray."""

import os

from openrlhf import heap

# Ray reads this variable at import. The line is vLLM's, which prints it before it reads its log settings.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^Triton is installed")
heap.grow()
