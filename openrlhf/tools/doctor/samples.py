"""Computes statistics of a step's answers from its rollouts: their common parts, entropy and rewards."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from openrlhf.api import read_table

NGRAM = 8
"""Number of tokens of the n-grams that are counted."""
EDGE = 4
"""Number of tokens at the beginning and at the end of an answer that count as its format."""
MOST_SAMPLES = 512
"""Maximum number of samples of a step that are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Statistics of the answers of a step, over samples with a reward."""

    count: int
    surprise: float
    """Mean of minus the sampler's log-prob, in nats per action: an estimate of the policy's entropy."""
    ngram_share: float
    """Fraction of the samples that contain the most common n-gram of actions."""
    format_share: float
    """Fraction of the samples with the most common first EDGE and last EDGE + 1 actions, the last of which is
    usually the stop token."""
    duplicates: float
    """Fraction of the samples whose actions repeat those of another sample of the step."""
    rewards: tuple[float, ...]
    contains_label: float
    """Fraction of the samples with the lowest reward whose answer contains the label; 0 without labels."""


def read_answers(path: Path) -> Answers | None:
    """Reads the rollouts of a step. Returns None if no sample has a reward."""
    columns = ["reward", "token_ids", "action_ranges", "rollout_log_probs", "label", "response"]
    rows = read_table(path, columns).slice(0, MOST_SAMPLES).to_pylist()
    rows = [row for row in rows if row["reward"] is not None]
    if not rows:
        return None
    actions = [
        [token for span in row["action_ranges"] for token in row["token_ids"][span["start"] : span["end"]]]
        for row in rows
    ]
    log_probs = np.concatenate([np.asarray(row["rollout_log_probs"], float) for row in rows])
    rewards = tuple(float(row["reward"]) for row in rows)
    lowest = [row for row in rows if row["reward"] == min(rewards)]
    return Answers(
        count=len(rows),
        surprise=float(-log_probs.mean()) if len(log_probs) else 0.0,
        ngram_share=_commonest(
            {tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)} for ids in actions
        ),
        format_share=_commonest({(tuple(ids[:EDGE]), tuple(ids[-EDGE - 1 :]))} for ids in actions),
        duplicates=1 - len({tuple(ids) for ids in actions}) / len(actions),
        rewards=rewards,
        contains_label=float(np.mean([_has_label(row["label"], row["response"]) for row in lowest])),
    )


def _commonest(of_samples: Iterable[set]) -> float:
    """Returns the fraction of the samples that have the most common item."""
    sets = list(of_samples)
    counts = Counter(item for items in sets for item in items)
    return max(counts.values(), default=0) / len(sets)


def _has_label(label: str | None, response: str | None) -> bool:
    wanted = (label or "").strip('"')
    return bool(wanted) and wanted not in ("null", "[]", "{}") and wanted in (response or "")
