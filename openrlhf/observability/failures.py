"""Finds the most common error among failed samples."""

import re
from collections import Counter
from collections.abc import Sequence

from openrlhf.types import Trajectory


def commonest_failure(failed: Sequence[Trajectory]) -> tuple[Trajectory, int]:
    """Returns the first sample with the most common error, and the number of samples with it. Errors that
    differ only in numbers and quoted words count as the same. `failed` must not be empty."""
    kind, count = Counter(map(_kind, failed)).most_common(1)[0]
    return next(t for t in failed if _kind(t) == kind), count


def headline(failed: Trajectory) -> str:
    """Returns the first line of a failed sample's error."""
    return (failed.error or failed.outcome.value).strip().partition("\n")[0]


def _kind(failed: Trajectory) -> str:
    return re.sub(r"""\d+|'[^']*'|"[^"]*\"""", "_", headline(failed))
