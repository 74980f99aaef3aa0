"""Computes the sizes of a run's batches: prompts, samples, optimizer steps and rows."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from openrlhf.api import (
    Layout,
    ModelSize,
    PPOConfig,
    SupervisedConfig,
    count_rows,
    most_tokens,
    num_batches,
    prompts_of_steps,
)
from openrlhf.tools.plan.hardware import Cluster

SEQUENCES: Mapping[str, int] = {"rm": 2, "dpo": 2, "kto": 2}
"""Number of sequences of an item, for commands where it is not 1: chosen and rejected, or an answer and a
mismatched one (KTO)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Numbers of tokens of a sample: means, which are given or assumed, and the maximum that the flags
    allow."""

    prompt: int
    """Mean tokens of a prompt."""
    response: int
    """Mean tokens of a response; of the whole sequence in supervised learning."""
    longest: int
    """Maximum number of tokens of a response."""
    assumed: tuple[str, ...]
    """Names of the means that are assumptions, prompt or response. The others were given or measured."""

    @property
    def total(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Numbers of prompts, samples and rows in a step of a run. In supervised learning a step is one optimizer
    step."""

    prompts: int
    """Prompts of a step; in supervised learning items of a batch."""
    samples: int
    """Sequences of a step."""
    updates: int
    """Optimizer steps of a step."""
    batch_size: int
    """Samples of an optimizer step."""
    ranks: int
    """Data-parallel copies of the trained model."""
    samples_per_rank: float
    """Samples of an optimizer step on one copy."""
    row_tokens: int
    """Maximum number of tokens of a row, summed over the sequence-parallel ranks that share it."""
    rows_per_rank: int
    """Rows (micro-batches) of an optimizer step on one copy, at mean lengths."""
    steps: int | None
    """Steps of the run; None if the number of dataset rows is unknown."""
    rows: int | None
    """Rows of the dataset; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run on its hardware, with the sizes of its models, samples and batches."""

    config: Any
    cluster: Cluster
    layout: Layout | None
    """Placement of an RL run's roles; None for supervised commands, whose ranks fill the cluster."""
    sizes: Mapping[str, ModelSize]
    """Size of each role's model."""
    lengths: Lengths
    batches: Batches

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batches.samples * self.lengths.total


def estimate_lengths(max_len: int, longest: int | None, prompt: int | None, response: int | None) -> Lengths:
    """Returns the lengths of a run's samples. A mean that is None is assumed. An assumed prompt has the
    tokens of `max_len` that the longest response leaves, at least an eighth; an assumed response is half as
    long as it may be. `longest`: the flag rollout.max_new_tokens."""
    assumed = ("prompt",) * (prompt is None) + ("response",) * (response is None)
    prompt = prompt or max(max_len - (longest or max_len), max_len // 8)
    most = min(longest or max_len, max_len - prompt)
    return Lengths(prompt=prompt, response=response or max(1, most // 2), longest=most, assumed=assumed)


def ppo_batches(config: PPOConfig, lengths: Lengths, rows: int | None) -> Batches:
    steps = None if rows is None else prompts_of_steps(config, rows)
    prompts = max(steps, default=1) if steps is not None else config.rollout.batch_size
    samples = prompts * config.rollout.n_samples_per_prompt
    ranks, batch = config.data_parallel_size, min(config.samples_per_update, samples)
    return Batches(
        prompts=prompts,
        samples=samples,
        updates=num_batches(samples, config.samples_per_update) * config.train.max_epochs,
        batch_size=batch,
        ranks=ranks,
        samples_per_rank=batch / ranks,
        row_tokens=most_tokens(config.train, config.data.max_len, config.ds.ring_attn_size),
        rows_per_rank=_rows(config, batch / ranks, lengths.total),
        steps=None if steps is None else len(steps),
        rows=rows,
    )


def supervised_batches(
    config: SupervisedConfig, cluster: Cluster, lengths: Lengths, rows: int | None, *, sequences: int
) -> Batches:
    ds, batch = config.ds, min(config.train.batch_size, rows or config.train.batch_size)
    ranks = max(1, cluster.devices // (ds.ring_attn_size * ds.tensor_parallel_size))
    steps = None if rows is None else math.ceil(rows / batch) * config.train.max_epochs
    if steps is not None and config.train.max_steps is not None:
        steps = min(steps, config.train.max_steps)
    return Batches(
        prompts=batch,
        samples=sequences * batch,
        updates=1,
        batch_size=batch,
        ranks=ranks,
        samples_per_rank=batch / ranks,
        row_tokens=most_tokens(config.train, sequences * config.data.max_len, ds.ring_attn_size),
        rows_per_rank=_rows(config, batch / ranks, sequences * lengths.total),
        steps=steps,
        rows=rows,
    )


def _rows(config: PPOConfig | SupervisedConfig, samples: float, tokens: int) -> int:
    """Returns ceil(samples * tokens / budget) with a token budget, else ceil(samples / micro-batch)."""
    if not config.train.dynamic_batch_enable:
        return math.ceil(samples / config.train.micro_batch_size)
    budget = config.train.max_tokens_per_gpu * config.ds.ring_attn_size
    return math.ceil(samples / max(1, budget // tokens))


def count_training_rows(config: PPOConfig | SupervisedConfig) -> int | None:
    """Counts the rows of the training data; None if they are not on this machine, or if it takes long."""
    if isinstance(config, PPOConfig):
        data = config.data
        spec, split, probs, most = data.prompt_dataset, data.prompt_split, data.prompt_probs, data.max_samples
    else:
        rows = config.data
        spec, split, probs, most = rows.dataset, rows.dataset_split, rows.dataset_probs, rows.max_samples
    with suppress(OSError, ValueError):  # a run is also planned where its data is not
        seed = config.train.seed
        return count_rows(str(spec), flag="--rows", probs=probs, split=split, max_samples=most, seed=seed)
    return None
