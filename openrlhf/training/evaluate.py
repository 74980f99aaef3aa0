"""Evaluation metrics: mean and best scores and pass@k of each source of the evaluation prompts."""

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from openrlhf.types import Metrics, Trajectory, present

Samples = list[Trajectory]
"""The finished samples of one prompt, at least one."""


def evaluation_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Returns the `eval/...` metrics of each source and overall. There must be at least one sample. n is the
    number of samples per prompt.

    `{source}_score_mean` is the mean score, `{source}_best_of{k}` the expected best score of k samples, for k
    = 2, 4, 8, ... below n and k = n. Both are means over prompts. If all scores of a source are 0 or 1, they
    are also reported as `{source}_pass1` and `{source}_pass{k}`: the unbiased pass@k of
    https://arxiv.org/abs/2107.03374.

    Failed samples count in `failed_ratio` only. For a prompt with m < k finished samples, the best of m
    replaces the best of k, which underestimates it. Leaving such prompts out would be worse: `best_of{k}` and
    `score_mean` would then average over different prompts, and prompts with failed samples are not typical. A
    source whose samples all failed has no metrics.
    """
    samples = [t for t in trajectories if t.is_first]
    groups: dict[str, dict[int, Samples]] = defaultdict(lambda: defaultdict(list))
    for t in samples:
        if t.ok:
            groups[t.prompt.source][t.prompt.prompt_id].append(t)
    finished = [t for t in trajectories if t.ok]
    num_samples = 1 + max(t.sample_index for t in samples)
    metrics: Metrics = {}
    for source, prompts in groups.items():
        metrics |= _score_metrics(f"eval/{source}_", list(prompts.values()), ks_of(num_samples))
    for source in groups:
        metrics |= _answer_metrics(f"eval/{source}_", [t for t in finished if t.prompt.source == source])
    metrics |= _answer_metrics("eval/", finished)
    return metrics | {"eval/failed_ratio": sum(not t.ok for t in samples) / len(samples)}


def ks_of(num_samples: int) -> list[int]:
    """Returns 1, 2, 4, ... below `num_samples`, and `num_samples`."""
    return [2**i for i in range((num_samples - 1).bit_length())] + [num_samples]


def expected_best(scores: Sequence[float], k: int) -> float:
    """Returns the mean, over all subsets of k scores, of the largest one."""
    n, total = len(scores), 0.0
    # The i-th smallest score (from 0) is the largest in a fraction C(i, k - 1) / C(n, k) of the subsets.
    probability = k / n
    for i, score in reversed(list(enumerate(sorted(scores)))[k - 1 :]):
        total += probability * score
        probability *= (i - k + 1) / max(i, 1)
    return total


def as_scores(key: str) -> str:
    """Maps the metric names of pass@1 and pass@k to those of the mean score and the best of k. Returns other
    names unchanged."""
    return re.sub(r"_pass(\d+)$", r"_best_of\1", re.sub("_pass1$", "_score_mean", key))


def _score_metrics(prefix: str, prompts: Sequence[Samples], ks: Sequence[int]) -> Metrics:
    scores = [[present(t.score) for t in group] for group in prompts]
    best = {k: fmean(expected_best(s, min(k, len(s))) for s in scores) for k in ks}
    passes = {f"{prefix}pass{k}": value for k, value in best.items()}
    are_binary = all(score in (0, 1) for group in scores for score in group)
    return (passes if are_binary else {}) | {as_scores(name): value for name, value in passes.items()}


def _answer_metrics(prefix: str, finished: Sequence[Trajectory]) -> Metrics:
    """Returns counts and lengths. As in training, a sample with several sequences counts once in counts and
    once per sequence in lengths."""
    metrics = {f"{prefix}num_samples": float(sum(t.is_first for t in finished))}
    if finished:
        metrics[f"{prefix}response_length_mean"] = fmean(t.num_actions for t in finished)
        metrics[f"{prefix}truncated_rate"] = fmean(t.truncated for t in finished)
    return metrics
