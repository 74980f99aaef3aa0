"""Computes evaluation metrics: mean and best scores, and pass@k, for each source of the evaluation
prompts."""

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from openrlhf.types import Metrics, Trajectory, present

Samples = list[Trajectory]
"""The finished samples of one prompt, at least one."""


def evaluation_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Returns the `eval/...` metrics of each source and overall, from at least one sample; each prompt has n
    samples.

    `{source}_score_mean` is the mean score, `{source}_best_of{k}` the expected best score of k samples, for
    k = 2, 4, 8, ... below n and k = n: means over prompts, which are told apart by id. Where all scores of a
    source are 0 or 1 these also are `{source}_pass1` and `{source}_pass{k}`: the unbiased pass@k of
    https://arxiv.org/abs/2107.03374.

    Failed samples count in `failed_ratio` and nowhere else. A prompt with m < k samples left gives the best
    of m, which is too low rather than too high: leaving it out would compare k samples of some prompts with
    one of others, and prompts that fail are seldom like those that do not. A source of which everything
    failed has no figures.
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
    # Of the choices, C(i, k - 1) / C(n, k) have the i-th smallest score (from 0) as their largest.
    probability = k / n
    for i, score in reversed(list(enumerate(sorted(scores)))[k - 1 :]):
        total += probability * score
        probability *= (i - k + 1) / max(i, 1)
    return total


def as_scores(key: str) -> str:
    """Maps the names of pass@1 and pass@k to those for arbitrary scores: the mean and the best of k. Leaves
    other names unchanged."""
    return re.sub(r"_pass(\d+)$", r"_best_of\1", re.sub("_pass1$", "_score_mean", key))


def _score_metrics(prefix: str, prompts: Sequence[Samples], ks: Sequence[int]) -> Metrics:
    scores = [[present(t.score) for t in group] for group in prompts]
    best = {k: fmean(expected_best(s, min(k, len(s))) for s in scores) for k in ks}
    passes = {f"{prefix}pass{k}": value for k, value in best.items()}
    is_verdict = all(score in (0, 1) for group in scores for score in group)
    return (passes if is_verdict else {}) | {as_scores(name): value for name, value in passes.items()}


def _answer_metrics(prefix: str, finished: Sequence[Trajectory]) -> Metrics:
    """Returns counts and lengths. A sample of several sequences counts once, with the length of each
    sequence, as in training."""
    metrics = {f"{prefix}num_samples": float(sum(t.is_first for t in finished))}
    if finished:
        metrics[f"{prefix}response_length_mean"] = fmean(t.num_actions for t in finished)
        metrics[f"{prefix}truncated_rate"] = fmean(t.truncated for t in finished)
    return metrics
