"""Selects the metrics that show the progress of a run by their names."""

import re
from collections.abc import Iterable

HEADLINES = (
    (r"eval[/_].*(_pass1|_score_mean|accuracy)", 2),
    (r"eval[/_].*loss", 1),
    (r"(rollout/)?(reward_mean|reward)", 1),
    (r"rollout/score_mean", 1),
    (r"(?!eval|policy|critic).*\b(accuracy|acc_mean)", 1),
    (r"(?!eval|policy|critic).*\bloss", 1),
    (r"(rollout/)?response_length_mean", 1),
    (r"kl/mean|(?!eval|mismatch).*/kl|kl", 1),
    (r"policy/entropy", 1),
    (r"(rollout/)?truncated_rate", 1),
)
"""(pattern of metric names, maximum number of metrics), in the order of importance. The losses of policy and
critic are left out, because they do not show progress."""


def headlines(names: Iterable[str]) -> list[str]:
    """Returns the metrics that show the progress of a run, the most important first."""
    names, chosen = list(names), []
    for pattern, limit in HEADLINES:
        found = [name for name in names if re.fullmatch(pattern, name)]
        chosen += [name for name in found[:limit] if name not in chosen]
    return chosen
