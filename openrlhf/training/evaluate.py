"""Evaluation metrics: mean and best scores and pass@k of each source of the evaluation prompts."""

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.types import Metrics, Trajectory, not_none


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
    groups: dict[str, dict[int, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
    for t in samples:
        if t.ok:
            groups[t.prompt.source][t.prompt.prompt_id].append(t)
    finished = [t for t in trajectories if t.ok]
    num_samples = 1 + max(t.sample_index for t in samples)
    metrics: Metrics = {}
    for source, prompts in groups.items():
        metrics |= _score_metrics(f"eval/{source}_", list(prompts.values()), list_ks(num_samples))
    for source in groups:
        metrics |= _answer_metrics(f"eval/{source}_", [t for t in finished if t.prompt.source == source])
    metrics |= _answer_metrics("eval/", finished)
    return metrics | {"eval/failed_ratio": sum(not t.ok for t in samples) / len(samples)}


def list_ks(num_samples: int) -> list[int]:
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


def _score_metrics(prefix: str, prompts: Sequence[list[Trajectory]], ks: Sequence[int]) -> Metrics:
    """`prompts`: the finished samples of each, at least one."""
    scores = [[not_none(t.score) for t in group] for group in prompts]
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


def best_metric(key: str, metrics: Metrics, sources: Sequence[str]) -> float | None:
    """Returns the value of the metric that ranks checkpoints: the one that `ckpt.best_metric_key` names, or
    the mean score of the first source if `key` is empty. Returns None if the key is "none", nothing was
    evaluated, or every sample of the metric's source failed. `sources`: those of the evaluation. Raises
    UsageError for an unknown metric."""
    evaluated = sorted(name for name in metrics if name.startswith("eval/"))
    if key == "none" or not evaluated:
        return None
    asked = key.removeprefix("eval/") or f"{sources[0]}_score_mean"
    names = (f"eval/{asked}", f"eval/{asked.removeprefix('eval_')}")  # older versions: eval_default_pass1
    names += tuple(as_scores(name) for name in names)
    name = next((name for name in names if name in metrics), names[1])
    failed = [source for source in sources if f"eval/{source}_score_mean" not in metrics]
    if name in metrics or any(name.startswith(f"eval/{source}_") for source in failed):
        return metrics.get(name)
    text = f"no evaluation metric has this name; there are {', '.join(evaluated)}"
    raise UsageError(ErrorCode.INVALID_VALUE, text, flag="--ckpt.best_metric_key", value=key)
