"""Simulates a run's meshes and batches in full size, without processes."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from openrlhf.api import Mesh, MiniBatches, PPOConfig, training_schedule
from openrlhf.tools.plan.estimate import RunPlan


def simulate(config: Any, plan: RunPlan) -> Iterator[str]:
    """Yields descriptions of the meshes and of the tokens of ranks. Raises AssertionError if a rank or a
    sample is missing or counted twice."""
    if isinstance(config, PPOConfig):
        meshes = {role: place.mesh for role, place in config.placements.items()}
        ranks = config.data_parallel_size
    else:
        ds = config.ds
        whole = Mesh.within(plan.cluster.devices, sequence=ds.ring_attn_size, tensor=ds.tensor_parallel_size)
        meshes, ranks = {"model": whole}, whole.data
    for role, mesh in meshes.items():
        check_mesh(mesh)
        sizes = " x ".join(f"{size} {name}" for name, size in zip(mesh.DIMENSIONS, mesh.shape, strict=True))
        yield f"{role}: {mesh.size} ranks, {sizes} parallel"
    most, least = _dealt_rl(config, plan) if isinstance(config, PPOConfig) else _dealt(config, plan, ranks)
    yield f"{plan.batches.batch_size} samples on {ranks} data-parallel ranks: {least:,} to {most:,} tokens"


def check_mesh(mesh: Mesh) -> None:
    """Checks that the groups of each dimension contain every rank once, and that coordinates and ranks are
    inverse to each other."""
    everyone = set(range(mesh.size))
    assert all(mesh.rank_at(mesh.coordinates(rank)) == rank for rank in everyone), f"{mesh}: coordinates"
    for name, size in zip(mesh.DIMENSIONS, mesh.shape, strict=True):
        groups = {tuple(mesh.group(name, rank)) for rank in everyone}
        assert {len(group) for group in groups} == {size}, f"{mesh}: sizes of the {name} groups"
        members = sorted(rank for group in groups for rank in group)
        assert members == sorted(everyone), f"{mesh}: members of the {name} groups"


def _lengths(plan: RunPlan, count: int) -> list[int]:
    """Returns random lengths of samples, from 1 to twice the plan's mean."""
    mean, rng = plan.lengths.total, random.Random(0)
    return [rng.randint(1, 2 * mean) for _ in range(count)]


class _Items:
    """A dataset of items that have only lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int, /) -> int:
        return i

    def sequences(self, i: int, /) -> tuple:
        raise NotImplementedError("these items have no tokens")


def _dealt(config: Any, plan: RunPlan, ranks: int) -> tuple[int, int]:
    """Distributes the items of one optimizer step over the ranks. Returns the largest and the smallest number
    of tokens of a rank."""
    train, lengths = config.train, _lengths(plan, config.train.batch_size)
    budget = train.max_tokens_per_gpu * config.ds.ring_attn_size
    collate: Any = list
    mini_batches: MiniBatches = MiniBatches(
        _Items(lengths),
        collate,
        batch_size=train.batch_size,
        micro_batch_size=None if train.dynamic_batch_enable else train.micro_batch_size,
        max_tokens=budget if train.dynamic_batch_enable else None,
        data_rank=0,
        data_size=ranks,
        seed=train.seed,
    )
    of_rank = [[i for row in rows for i in row] for rows in mini_batches.shard(range(len(lengths)))]
    return _spread(of_rank, lengths)


def _dealt_rl(config: PPOConfig, plan: RunPlan) -> tuple[int, int]:
    """Distributes the samples of one RL step over optimizer steps and ranks. Returns the largest and the
    smallest number of tokens of a rank in the first optimizer step."""
    count, batches = config.samples_per_step, max(1, config.updates_per_step // config.train.max_epochs)
    lengths, group = _lengths(plan, count), config.rollout.n_samples_per_prompt
    steps = training_schedule(
        lengths,
        range(count),
        num_batches=batches,
        epochs=1,
        num_ranks=config.data_parallel_size,
        seed=(config.train.seed,),
        groups=[i // group for i in range(count)] if config.train.shuffle == "group" else None,
    )
    trained_on = sorted(i for step in steps for rank in step for i in rank)
    assert trained_on == [*range(count)], "an RL step does not train on each of its samples once"
    return _spread(steps[0], lengths, whole=False)


def _spread(
    of_rank: Sequence[Sequence[int]], lengths: Sequence[int], *, whole: bool = True
) -> tuple[int, int]:
    given = sorted(i for mine in of_rank for i in mine)
    assert not whole or given == [*range(len(lengths))], "the ranks do not get each sample once"
    tokens = [sum(lengths[i] for i in mine) for mine in of_rank]
    return max(tokens), min(tokens)
