"""Which experiences go into which optimizer step, and on which rank."""

import random
from collections.abc import Sequence

from openrlhf.config.ppo import PPOConfig
from openrlhf.data.packing import partition
from openrlhf.types import Metrics


def prompts_of_steps(config: PPOConfig, num_prompts: int) -> list[int]:
    """Prompts that each RL step of a whole run trains on. An episode's last step has what is left of it; with
    dynamic filtering, which fills batches across episodes, only the run's last one. What filtering drops is
    not known before, so then it is the most that a run can have."""
    size, episodes = config.rollout.batch_size, config.train.num_episodes
    stretches = [num_prompts] * episodes
    if config.algo.dynamic_filtering_enable:
        stretches = [num_prompts * episodes]
    steps = [min(size, stretch - start) for stretch in stretches for start in range(0, stretch, size)]
    return steps[: config.train.max_steps]


def num_updates(config: PPOConfig, num_prompts: int, first_step: int = 0) -> int:
    """Optimizer steps of a whole run in which learning starts after `first_step` RL steps."""
    samples, batch_size = config.rollout.n_samples_per_prompt, config.train.batch_size
    steps = prompts_of_steps(config, num_prompts)[first_step:]
    return config.train.max_epochs * sum(num_batches(prompts * samples, batch_size) for prompts in steps)


def num_batches(num_sampled: int, batch_size: int) -> int:
    """Optimizer steps of one pass over a rollout of `num_sampled`, failed samples included: failures make
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
    """[step][rank] -> indices of samples. Each epoch visits every one of `trained_on` once, in an order of
    its own; batches differ by at most one sample and are never empty (fewer samples than batches make fewer
    batches), and a batch's ranks get about the same number of tokens."""
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
    """Over optimizer steps that report the same metrics."""
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
