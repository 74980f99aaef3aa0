"""How good the policy is: pass@1 and pass@k for each source of the evaluation prompts."""

import math
from collections import defaultdict
from collections.abc import Sequence

from openrlhf.types import Metrics, Trajectory, present


def evaluation_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """`eval/{source}_pass1`, `eval/{source}_pass{k}` and lengths, over all samples of the evaluation prompts.

    pass1 is the mean score, pass{k} the expected best score of k samples, k being the samples of a prompt;
    both are means over prompts, which are told apart by id. For scores of 0 and 1 that is the unbiased pass@k
    of https://arxiv.org/abs/2107.03374. Failed samples count in `eval/failed_ratio` and nowhere else.
    """
    by_source: dict[str, dict[int, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
    k = 0
    for t in trajectories:
        by_source[t.prompt.source][t.prompt.prompt_id].append(t)
        k = max(k, t.sample_index + 1)
    metrics = {"eval/failed_ratio": sum(not t.ok for t in trajectories) / len(trajectories)}
    for source, prompts in by_source.items():
        finished = [[t for t in group if t.ok] for group in prompts.values()]
        finished = [group for group in finished if group]
        if not finished:
            continue
        scores = [[present(t.score) for t in group] for group in finished]
        samples = [t for group in finished for t in group]
        metrics |= {
            f"eval/{source}_pass1": _mean([_mean(s) for s in scores]),
            f"eval/{source}_pass{k}": _mean([expected_best(s, min(k, len(s))) for s in scores]),
            f"eval/{source}_response_length_mean": _mean([t.num_actions for t in samples]),
            f"eval/{source}_truncated_rate": _mean([t.truncated for t in samples]),
            f"eval/{source}_num_samples": float(len(samples)),
        }
    return metrics


def expected_best(scores: Sequence[float], k: int) -> float:
    """Mean, over all choices of k of the scores, of the largest one."""
    ascending = sorted(scores)
    n = len(ascending)
    # the i-th smallest (from 0) is the largest of the choices that take it and k - 1 of the i below it
    return sum(s * math.comb(i, k - 1) for i, s in enumerate(ascending)) / math.comb(n, k)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
