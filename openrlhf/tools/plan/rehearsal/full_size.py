"""Simulates a run's meshes and batches in full size, without processes."""

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from openrlhf.api import Mesh, PPOConfig, lay_out, training_schedule
from openrlhf.tools.plan.estimate import RunPlan


def simulate(config: Any, plan: RunPlan) -> Iterator[str]:
    """Yields descriptions of the meshes, and of the tokens that the ranks get in the first optimizer step, if
    samples have random lengths from 1 to twice the plan's mean."""
    mean, rng = plan.lengths.total, random.Random(0)
    draw = lambda count: [rng.randint(1, 2 * mean) for _ in range(count)]
    if isinstance(config, PPOConfig):
        meshes = {role: place.mesh for role, place in config.placements.items()}
        lengths = draw(config.samples_per_step)
        dealt = _deal_rl(config, lengths)
    else:
        ds = config.ds
        mesh = Mesh.within(plan.cluster.devices, sequence=ds.ring_attn_size, tensor=ds.tensor_parallel_size)
        meshes, lengths = {"model": mesh}, draw(config.train.batch_size)
        dealt = _deal(config, lengths, mesh)
    yield from (f"{role}: {describe_mesh(mesh)}" for role, mesh in meshes.items())
    samples, tokens = sum(map(len, dealt)), [sum(lengths[i] for i in mine) for mine in dealt]
    yield (
        f"{samples} samples on {len(dealt)} data-parallel ranks: {min(tokens):,} to {max(tokens):,} tokens"
    )


def describe_mesh(mesh: Mesh) -> str:
    """Returns the number of ranks and the sizes above 1, such as `8 ranks (4 data x 2 tensor parallel)`."""
    sizes = zip(mesh.shape, mesh.DIMENSIONS, strict=True)
    split = " x ".join(f"{size} {name}" for size, name in sizes if size > 1)
    return f"{mesh.size} rank{'s' * (mesh.size > 1)}" + (f" ({split} parallel)" if split else "")


def _deal(config: Any, lengths: Sequence[int], mesh: Mesh) -> list[list[int]]:
    task: Any = SimpleNamespace(config=config, collate=list)
    dataset: Any = SimpleNamespace(lengths=lengths)
    place: Any = SimpleNamespace(data=mesh.data, sequence=mesh.sequence, data_rank=0)
    steps = lay_out(task, dataset, batch_size=len(lengths), shuffle=False, mesh=place)
    return [[i for row in rows for i in row] for rows in steps.shard(range(len(lengths)))]


def _deal_rl(config: PPOConfig, lengths: Sequence[int]) -> list[list[int]]:
    groups = [i // config.rollout.n_samples_per_prompt for i in range(len(lengths))]
    return training_schedule(
        lengths,
        range(len(lengths)),
        num_batches=max(1, config.updates_per_step // config.train.max_epochs),
        epochs=1,
        num_ranks=config.data_parallel_size,
        seed=(config.train.seed,),
        groups=groups if config.train.shuffle == "group" else None,
    )[0]
