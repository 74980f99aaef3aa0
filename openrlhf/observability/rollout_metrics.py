"""Metrics of a step's samples, computed before the update."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from statistics import StatisticsError, correlation, fmean, pstdev

import numpy as np

from openrlhf.observability.hooks.base import Hook, Step
from openrlhf.types import Metrics, Trajectory, not_none


class RolloutMetrics(Hook):
    """Adds the metrics of a step's samples to those of the step, while the models read the samples."""

    def scoring(self, step: Step) -> None:
        own = rollout_metrics(step.samples, step.version) | source_metrics(step.samples, step.version)
        step.metrics |= own | step.metrics  # extra_logs may have the names of metrics that are there


OF_SOURCES = (
    *("num_samples", "failed_ratio", "reward_mean", "score_mean", "response_length_mean"),
    "truncated_rate",
)


def source_metrics(trajectories: Sequence[Trajectory], version: int) -> Metrics:
    """Returns the metrics `rollout/{source}_NAME` of each source, with the names in OF_SOURCES, if there are
    several sources."""
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for t in trajectories:
        by_source[t.prompt.source].append(t)
    metrics: Metrics = {}
    for source, own in by_source.items() if len(by_source) > 1 else ():
        found = rollout_metrics(own, version)
        known = [name for name in OF_SOURCES if f"rollout/{name}" in found]
        metrics |= {f"rollout/{source}_{name}": found[f"rollout/{name}"] for name in known}
    return metrics


def rollout_metrics(trajectories: Sequence[Trajectory], version: int) -> Metrics:
    """Returns the `rollout/...` metrics of at least one sample. `version`: version of the weights that will
    be trained on the samples.

    Failed samples are counted, and excluded from all other metrics. A sample with several sequences counts
    once in reward metrics and once per sequence in length metrics. Undefined metrics are omitted: means if
    all samples failed, a correlation if one variable is constant. `extra_logs` are reported under their
    names, except names that the run uses itself.
    """
    finished, samples = [t for t in trajectories if t.ok], [t for t in trajectories if t.is_first]
    metrics = {
        "rollout/num_samples": float(len(samples)),
        "rollout/failed_ratio": sum(not t.ok for t in samples) / len(samples),
    }
    for outcome, count in Counter(t.outcome for t in samples if not t.ok).items():
        metrics[f"rollout/{outcome.value}_count"] = float(count)
    if not finished:
        return metrics
    actions = [t.action_ids for t in finished]
    extra = defaultdict[str, list[float]](list)
    for t in finished:
        for name, value in t.extra_logs.items() if t.is_first else ():
            extra[f"rollout/{name}"].append(value)
    return (
        {name: fmean(values) for name, values in sorted(extra.items())}
        | _reward_and_length(finished)
        | _staleness(finished, version)
        | _nuclei(finished)
        | _duplicates(finished, actions)
        | _repetition(actions)
        | metrics
    )


def _reward_and_length(finished: Sequence[Trajectory]) -> Metrics:
    samples = [t for t in finished if t.is_first]
    rewards = [not_none(t.reward) for t in samples]
    lengths = [float(t.num_actions) for t in finished]
    metrics = {
        "rollout/reward_mean": fmean(rewards),
        "rollout/reward_std": pstdev(rewards),
        "rollout/reward_max": max(rewards),
        "rollout/score_mean": fmean(not_none(t.score) for t in samples),
        "rollout/response_length_mean": fmean(lengths),
        "rollout/response_length_std": pstdev(lengths),
        "rollout/response_length_max": max(lengths),
        "rollout/total_length_mean": fmean(len(t.token_ids) for t in finished),
        "rollout/truncated_rate": fmean(t.truncated for t in finished),
    }
    if metrics["rollout/reward_std"] > 0 and metrics["rollout/response_length_std"] > 0:
        each = [not_none(t.reward) for t in finished]
        with suppress(StatisticsError):  # squares of tiny differences are 0
            metrics["rollout/length_reward_correlation"] = correlation(lengths, each)
    return metrics


def _staleness(finished: Sequence[Trajectory], version: int) -> Metrics:
    """Returns the mean and maximum staleness over all actions: the number of updates between the weights that
    sampled an action and `version`."""
    versions, counts = np.concatenate([t.weight_versions for t in finished]).T
    if not len(versions):
        return {}
    ages = version - versions.astype(np.int64)
    return {
        "rollout/staleness_mean": float(ages @ counts / counts.sum()),
        "rollout/staleness_max": float(ages.max()),
    }


def _nuclei(finished: Sequence[Trajectory]) -> Metrics:
    """Returns, over actions sampled with a recorded top-p/top-k nucleus, the mean number of recorded tokens
    and the mean probability outside them."""
    known = [t.kept for t in finished if t.kept is not None]
    counts = np.concatenate([kept.counts for kept in known] or [np.zeros(0)])
    if not counts.any():
        return {}
    log_masses = np.concatenate([kept.log_masses for kept in known])[counts > 0]
    return {
        "rollout/kept_set_size_mean": float(counts[counts > 0].mean()),
        "rollout/kept_set_rest_mean": float((1 - np.exp(log_masses)).mean()),
    }


def _duplicates(finished: Sequence[Trajectory], actions: Sequence[np.ndarray]) -> Metrics:
    """Returns the fraction of duplicates among all but the first samples of each group. A duplicate has the
    same actions as an earlier sample of its group: 0 if all differ, 1 if all are equal."""
    answers: list[tuple[tuple[int, int], bytes]] = []
    for t, own in zip(finished, actions, strict=True):
        before = answers.pop()[1] if answers and not t.is_first else b""
        answers.append((t.group, before + own.tobytes()))
    with_earlier = len(answers) - len({group for group, _ in answers})
    if not with_earlier:
        return {}
    return {"rollout/duplicate_ratio": (len(answers) - len(set(answers))) / with_earlier}


def _repetition(actions: Sequence[np.ndarray]) -> Metrics:
    """Returns the fraction of a sample's 4-grams that occurred earlier in the sample, as a mean over samples
    with at least one 4-gram: 0 without repetition, near 1 if one token is repeated."""
    long_enough = [own for own in actions if len(own) >= 4]
    blocks = [long_enough[start : start + BLOCK] for start in range(0, len(long_enough), BLOCK)]
    fractions = [fraction for block in blocks for fraction in _repeated_fractions(block)]
    return {"rollout/repetition_ratio": fmean(fractions)} if fractions else {}


BLOCK = 32
"""Number of samples whose 4-grams are hashed at a time: their numbers fit a core's cache."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Multiplier of the 4-gram hash: odd, with well-mixed bits (2^64 divided by the golden ratio)."""


def _repeated_fractions(samples: Sequence[np.ndarray]) -> list[float]:
    """Returns the fraction of repeated 4-grams among the actions of each sample, at least 4. 4-grams are
    compared by 64-bit hashes: among a million, the probability that any two different ones collide is
    3e-8."""
    ids = np.concatenate(samples).astype(np.uint64)
    hashes = ids[:-3].copy()
    for shift in (1, 2, 3):
        hashes *= FACTOR
        hashes += ids[shift : len(hashes) + shift]
    ends = np.cumsum([len(own) for own in samples]) - 3
    starts = np.concatenate([[0], ends[:-1] + 3])  # 4-grams of two samples lie between them
    for start, end in zip(starts, ends, strict=True):
        hashes[start:end].sort()
    repeated = np.concatenate([[0], (hashes[1:] == hashes[:-1]).cumsum()])
    return ((repeated[ends - 1] - repeated[starts]) / (ends - starts)).tolist()
