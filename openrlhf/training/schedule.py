"""Assigns samples to optimizer steps and ranks, and computes the number of steps."""

import math
import random
from collections.abc import Hashable, Sequence

import numpy as np

from openrlhf.backends.base import TrainableRanks
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.packing import partition
from openrlhf.data.related import identities, parts_of_related
from openrlhf.errors import ErrorCode, RunError
from openrlhf.observability.hooks.base import Step
from openrlhf.types import Batch, Metrics, Schedule


def prompts_of_steps(config: PPOConfig, num_prompts: int) -> list[int]:
    """Returns the number of prompts that each RL step of a run trains on. The last step of each pass over the
    prompts has the remainder. Dynamic filtering fills batches across passes, so only the run's last step has
    a remainder; it also drops an unknown number of prompts, so that the numbers are an upper bound. With
    quotas or a curriculum all steps are complete, as many as the passes fill, but at least one."""
    size, episodes = config.rollout.batch_size, config.train.num_episodes
    if config.draws_prompts:
        return ([size] * max(1, num_prompts * episodes // size))[: config.train.max_steps]
    stretches = [num_prompts] * episodes
    if config.algo.dynamic_filtering_enable:
        stretches = [num_prompts * episodes]
    steps = [min(size, stretch - start) for stretch in stretches for start in range(0, stretch, size)]
    return steps[: config.train.max_steps]


def num_updates(config: PPOConfig, num_prompts: int, first_step: int = 0) -> int:
    """Returns the number of optimizer steps of a model that is trained from RL step `first_step` on."""
    samples, batch_size = config.rollout.n_samples_per_prompt, config.samples_per_update
    steps = prompts_of_steps(config, num_prompts)[first_step:]
    return config.train.max_epochs * sum(num_batches(prompts * samples, batch_size) for prompts in steps)


def num_batches(num_sampled: int, batch_size: int) -> int:
    """Returns the number of optimizer steps of one pass over `num_sampled` samples, which include failed
    ones. Failures make the batches smaller but not fewer, because the learning rate schedule counts steps."""
    return max(1, round(num_sampled / batch_size))


def training_schedule(
    lengths: Sequence[int],
    trained_on: Sequence[int],
    *,
    num_batches: int,
    epochs: int,
    num_ranks: int,
    seed: tuple,
    token_ids: np.ndarray | None = None,
    groups: Sequence[Hashable] | None = None,
) -> list[list[list[int]]]:
    """Returns, for each optimizer step and rank, the indices of the samples to train on: [step][rank][i].
    Each epoch contains each of `trained_on` once, in a new random order. Batch sizes differ by at most one
    sample and are never 0; with fewer samples than `num_batches` there are fewer batches. The ranks of a
    batch get about the same number of tokens.

    token_ids: a number for each token of all samples (see `identities`), for models that read common prefixes
        once. Samples with common prefixes then go to one rank where that costs no time.
    groups: the group of each sample. All samples of a group are then in one batch. Batches have about equally
        many groups, and there are at most as many batches as groups.
    """
    rng = random.Random(repr(seed))
    units: dict[Hashable, list[int]] = {}
    for i in trained_on:
        units.setdefault(i if groups is None else groups[i], []).append(i)
    steps = []
    num_batches = min(num_batches, len(units))
    for _ in range(epochs):
        order = rng.sample([*units.values()], len(units))
        for b in range(num_batches):
            of_step = [i for unit in order[b::num_batches] for i in unit]
            if token_ids is None:
                parts = partition([lengths[i] for i in of_step], num_ranks)
            else:
                parts = parts_of_related(token_ids, lengths, num_ranks, of_step)
            steps.append([[of_step[i] for i in part] for part in parts])
    return steps


def trained_on(step: Step, *, with_truncated: bool) -> list[int]:
    """Returns the indices of the finished samples to train on. Raises RunError if none is left."""
    finished = step.finished
    if left := [i for i, t in enumerate(finished) if with_truncated or not t.truncated]:
        return left
    text = (
        f"step {step.number}: all {len(finished)} samples are truncated, so none is left to train on.\n"
        "Raise --rollout.max_new_tokens or --data.max_len."
    )
    raise RunError(ErrorCode.EPISODES_FAILED, text, flag="--rollout.mask_truncated")


def build_schedule(
    config: PPOConfig,
    model: TrainableRanks,
    batch: Batch,
    trained_on: Sequence[int],
    num_sampled: int,
    groups: Sequence[Hashable] | None = None,
    *,
    routed: bool,
) -> Schedule:
    """Returns the schedule of `train.max_epochs` passes of a model over the sequences `trained_on`. Each
    model has its own random order. `num_sampled`: number of samples, with failed ones. `groups`: see
    `training_schedule`. `routed`: whether the model replays the batch's routing of experts."""
    token_ids = None
    batches = 1 if config.train.force_on_policy else num_batches(num_sampled, config.train.batch_size)
    if config.ds.share_prefixes != "false":
        routing = batch.routing if routed else None
        token_ids = identities(batch.token_ids, batch.lengths, images=batch.images, routing=routing)
    return training_schedule(
        batch.lengths.tolist(),
        trained_on,
        num_batches=batches,
        epochs=config.train.max_epochs,
        num_ranks=model.data_parallel_size,
        seed=(config.train.seed, model.num_updates),
        token_ids=token_ids,
        groups=groups,
    )


def mean_metrics(steps: Sequence[Metrics], weights: Sequence[int] | None = None) -> Metrics:
    """Returns the mean of each metric over the optimizer steps or batches that report it: a skipped step
    lacks those that are not finite."""
    reported: dict[str, list[tuple[int, float]]] = {}
    for weight, step in zip(weights or [1] * len(steps), steps, strict=True):
        for name, value in step.items():
            reported.setdefault(name, []).append((weight, value))
    return {name: _mean(pairs) for name, pairs in reported.items()}


def _mean(pairs: Sequence[tuple[int, float]]) -> float:
    common = math.gcd(*(weight for weight, _ in pairs))  # so that the mean of one value is this value
    parts = [(weight // common, value) for weight, value in pairs]
    return sum(part * value for part, value in parts) / sum(part for part, _ in parts)
