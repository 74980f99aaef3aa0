"""How good the policy is: pass@1 and pass@k for each source of the evaluation prompts."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from openrlhf.types import Metrics, Trajectory, present

Group = list[Trajectory]
"""The samples of one prompt that did not fail, at least one."""


def evaluation_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """`eval/...` of each source and of all, of at least one sample; a prompt has n.

    `{source}_pass1` is the mean score, `{source}_pass{k}` the expected best score of k samples, for k = 2, 4,
    8, ... below n and k = n: means over prompts, which are told apart by id. For scores of 0 and 1 these are
    the unbiased pass@k of https://arxiv.org/abs/2107.03374.

    Failed samples count in `failed_ratio` and nowhere else. A prompt with m < k samples left gives the best
    of m, which is too low rather than too high: leaving it out would compare pass@k of some prompts with
    pass@1 of others, and prompts that fail are seldom like those that do not. A source of which everything
    failed has no figures.
    """
    groups: dict[str, dict[int, Group]] = defaultdict(lambda: defaultdict(list))
    for t in trajectories:
        if t.ok:
            groups[t.prompt.source][t.prompt.prompt_id].append(t)
    sources = {source: list(prompts.values()) for source, prompts in groups.items()}
    finished = [t for prompts in sources.values() for group in prompts for t in group]
    num_samples = 1 + max(t.sample_index for t in trajectories)
    metrics = {
        f"eval/{source}_pass{k}": _pass_at(k, prompts)
        for k in ks_of(num_samples)
        for source, prompts in sources.items()
    }
    for source, prompts in sources.items():
        metrics |= _answer_metrics(f"eval/{source}_", [t for group in prompts for t in group])
    metrics |= _answer_metrics("eval/", finished)
    return metrics | {"eval/failed_ratio": sum(not t.ok for t in trajectories) / len(trajectories)}


def ks_of(num_samples: int) -> list[int]:
    """1, 2, 4, ... below `num_samples`, and `num_samples`."""
    return [2**i for i in range((num_samples - 1).bit_length())] + [num_samples]


def expected_best(scores: Sequence[float], k: int) -> float:
    """Mean, over all choices of k of the scores, of the largest one."""
    n, total = len(scores), 0.0
    # Of the choices, C(i, k - 1) / C(n, k) have the i-th smallest score (from 0) as their largest.
    share = k / n
    for i, score in reversed(list(enumerate(sorted(scores)))[k - 1 :]):
        total += share * score
        share *= (i - k + 1) / max(i, 1)
    return total


def _pass_at(k: int, prompts: Sequence[Group]) -> float:
    scores = [[present(t.score) for t in group] for group in prompts]
    return fmean(expected_best(s, min(k, len(s))) for s in scores)


def _answer_metrics(prefix: str, finished: Sequence[Trajectory]) -> Metrics:
    metrics = {f"{prefix}num_samples": float(len(finished))}
    if finished:
        metrics[f"{prefix}response_length_mean"] = fmean(t.num_actions for t in finished)
        metrics[f"{prefix}truncated_rate"] = fmean(t.truncated for t in finished)
    return metrics
