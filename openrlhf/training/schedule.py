"""Assigns experiences to optimizer steps and ranks."""

import random
from collections.abc import Sequence

from openrlhf.config.ppo import PPOConfig
from openrlhf.data.packing import partition
from openrlhf.types import Metrics


def prompts_of_steps(config: PPOConfig, num_prompts: int) -> list[int]:
    """Returns the number of prompts that each RL step of a run trains on. The last step of an episode has the
    remainder; with dynamic filtering, which fills batches across episodes, only the run's last step has. As
    filtering drops prompts unpredictably, the numbers are then an upper bound."""
    size, episodes = config.rollout.batch_size, config.train.num_episodes
    stretches = [num_prompts] * episodes
    if config.algo.dynamic_filtering_enable:
        stretches = [num_prompts * episodes]
    steps = [min(size, stretch - start) for stretch in stretches for start in range(0, stretch, size)]
    return steps[: config.train.max_steps]


def num_updates(config: PPOConfig, num_prompts: int, first_step: int = 0) -> int:
    """Returns the optimizer steps of a run whose learning starts after `first_step` RL steps."""
    samples, batch_size = config.rollout.n_samples_per_prompt, config.train.batch_size
    steps = prompts_of_steps(config, num_prompts)[first_step:]
    return config.train.max_epochs * sum(num_batches(prompts * samples, batch_size) for prompts in steps)


def num_batches(num_sampled: int, batch_size: int) -> int:
    """Returns the optimizer steps of one pass over `num_sampled` samples, failed ones included: failures make
    batches smaller, never fewer, because the learning rate schedule counts steps."""
    return max(1, round(num_sampled / batch_size))


def training_schedule(
    lengths: Sequence[int],
    trained_on: Sequence[int],
    *,
    num_batches: int,
    epochs: int,
    num_ranks: int,
    seed: tuple,
) -> list[list[list[int]]]:
    """Returns [step][rank] -> indices of samples. Each epoch visits each of `trained_on` once, in an order of
    its own. Batch sizes differ by at most one sample and are never 0 (fewer samples than batches make fewer
    batches). The ranks of a batch get about the same number of tokens."""
    rng = random.Random(repr(seed))
    steps = []
    num_batches = min(num_batches, len(trained_on))
    for _ in range(epochs):
        order = rng.sample(trained_on, len(trained_on))
        for b in range(num_batches):
            batch = order[b::num_batches]
            parts = partition([lengths[i] for i in batch], num_ranks)
            steps.append([[batch[i] for i in part] for part in parts])
    return steps


def mean_metrics(steps: Sequence[Metrics]) -> Metrics:
    """Returns the mean of each metric over optimizer steps that report the same metrics."""
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
