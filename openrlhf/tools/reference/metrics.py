"""Metrics of RL steps and evaluations."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean, pstdev

import numpy as np
import torch

from openrlhf.api import Batch, Metrics, Trajectory, not_none
from openrlhf.tools.reference.policy import KL, LARGEST, plain_kl

SUBSETS = 500
"""Largest number of subsets over which a best of k is averaged one by one."""


def plain_rollout_metrics(trajectories: Sequence[Trajectory], version: int) -> Metrics:
    """Returns some `rollout/...` metrics; see `rollout_metrics`."""
    finished = [t for t in trajectories if t.ok]
    episodes = [t for t in finished if t.part == 0]
    if not episodes:
        return {}
    rewards = [not_none(t.reward) for t in episodes]
    ages = [(version - v, n) for t in finished for v, n in t.weight_versions.tolist()]
    num_actions = sum(n for _, n in ages)
    answers: list[tuple[tuple, list[int]]] = []
    groups: dict[tuple, list[list[int]]] = defaultdict(list)
    repeated = others = 0
    for t in finished:
        if t.part == 0:
            answers.append((t.group, []))
        answers[-1][1].extend(t.action_ids.tolist())
    for group, answer in answers:
        repeated += answer in groups[group]
        others += bool(groups[group])
        groups[group].append(answer)
    metrics = {
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "score_mean": fmean(not_none(t.score) for t in episodes),
        "response_length_mean": sum(int(t.action_mask.sum()) for t in finished) / len(finished),
        "truncated_rate": sum(t.truncated for t in finished) / len(finished),
    }
    if num_actions:
        metrics["staleness_mean"] = sum(age * n for age, n in ages) / num_actions
        metrics["staleness_max"] = float(max(age for age, _ in ages))
    metrics |= {"duplicate_ratio": repeated / others} if others else {}
    return {f"rollout/{name}": value for name, value in metrics.items()}


def plain_log_prob_metrics(batch: Batch, estimator: str) -> Metrics:
    """Returns the metrics of `advantages.log_prob_metrics` over all actions, and the explained variance of
    the critic. `estimator`: that of the KL to the reference."""
    if not len(batch.rollout_log_probs):
        return {}
    metrics: Metrics = {}
    if batch.log_probs is not None:
        policy = batch.log_probs.astype(np.float64)
        gap = torch.from_numpy(policy - batch.rollout_log_probs).clamp(-LARGEST, LARGEST)
        ratios = gap.exp()
        metrics["mismatch/kl"] = float(KL["k3"](-gap).mean())
        metrics["mismatch/abs_diff_mean"] = float(gap.abs().mean())
        metrics["mismatch/ess"] = float(ratios.mean() ** 2 / (ratios**2).mean())
        if batch.ref_log_probs is not None:
            difference = torch.from_numpy(policy - batch.ref_log_probs)
            metrics["kl/mean"] = float(plain_kl(difference, estimator).mean())
            metrics["kl/log_ratio_mean"] = float(difference.mean())
    if batch.values is not None and batch.returns is not None:
        returns, values = (x.astype(np.float64) for x in (batch.returns, batch.values))
        # Returns are sums of values: those of equal rewards differ by the rounding of these.
        if returns.var() > 1e-6 * np.maximum(values**2, returns**2).max():
            metrics["critic/explained_variance"] = float(1 - (returns - values).var() / returns.var())
    return metrics


def plain_evaluation_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Returns the scores of `evaluate.evaluation_metrics`, with each best of k as the mean over all subsets.
    Numbers of subsets above `SUBSETS` are left out."""
    samples = [t for t in trajectories if t.part == 0]
    n = 1 + max(t.sample_index for t in samples)
    scores: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for t in samples:
        if t.ok:
            scores[t.prompt.source][t.prompt.prompt_id].append(not_none(t.score))
    metrics = {"eval/failed_ratio": sum(not t.ok for t in samples) / len(samples)}
    for source, prompts in scores.items():
        for k in {*(2**i for i in range(n) if 2**i < n), n}:
            if math.comb(n, k) > SUBSETS:
                continue
            best = [fmean(map(max, combinations(found, min(k, len(found))))) for found in prompts.values()]
            name = "score_mean" if k == 1 else f"best_of{k}"
            metrics[f"eval/{source}_{name}"] = fmean(best)
    return metrics
