"""Which experiences go into which optimizer step, and on which rank."""

import random
from collections.abc import Sequence

from openrlhf.algos.balance import partition
from openrlhf.types import Metrics


def num_batches(num_sampled: int, batch_size: int) -> int:
    """Optimizer steps of one pass over a rollout of `num_sampled`, failed samples included: failures make
    batches smaller, never fewer, because the learning rate schedule counts steps."""
    return max(1, round(num_sampled / batch_size))


def training_schedule(
    lengths: Sequence[int], *, num_batches: int, epochs: int, num_ranks: int, seed: tuple
) -> list[list[list[int]]]:
    """[step][rank] -> indices of samples. Each epoch visits every sample once, in an order of its own;
    batches differ by at most one sample and are never empty, and a batch's ranks get about the same number of
    tokens."""
    rng = random.Random(repr(seed))
    steps = []
    num_batches = min(num_batches, len(lengths))
    for _ in range(epochs):
        order = rng.sample(range(len(lengths)), len(lengths))
        for b in range(num_batches):
            batch = order[b::num_batches]
            shares = partition([lengths[i] for i in batch], num_ranks)
            steps.append([[batch[i] for i in share] for share in shares])
    return steps


def mean_metrics(steps: Sequence[Metrics]) -> Metrics:
    """Over optimizer steps that report the same metrics."""
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
