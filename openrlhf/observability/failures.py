"""Why samples failed: the commonest error of many."""

import re
from collections import Counter
from collections.abc import Sequence

from openrlhf.types import Trajectory


def commonest_failure(failed: Sequence[Trajectory]) -> tuple[Trajectory, int]:
    """The first sample with the commonest error, and how many have it. Errors are the same where they differ
    in numbers and quoted words alone. At least one sample."""
    kind, count = Counter(map(_kind, failed)).most_common(1)[0]
    return next(t for t in failed if _kind(t) == kind), count


def headline(failed: Trajectory) -> str:
    """The first line of its error."""
    return (failed.error or failed.outcome.value).strip().partition("\n")[0]


def _kind(failed: Trajectory) -> str:
    return re.sub(r"""\d+|'[^']*'|"[^"]*\"""", "_", headline(failed))
