"""Gradients of PPO's loss on ranks that share a model: by the objective, and as a function of the log-probs
of the whole batch."""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from workers.gradients import experiences, options_of, policy

from openrlhf.backends.build import build_engine
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.sections import AdamConfig, OptimConfig
from openrlhf.rows import ExperienceRow, LossNorm
from openrlhf.tools.reference.policy import plain_policy_loss
from openrlhf.tools.verify.layouts import step_with_gradients
from openrlhf.training.objectives.policy import GivenGradient, PolicyObjective
from openrlhf.types import Batch

TEMPERATURE = 0.7


def ppo(log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
    norm = LossNorm(len(log_probs), len(batch))
    return plain_policy_loss(PPOConfig(), ExperienceRow.of(batch), norm, log_probs, None, 0.0)


def log_probs_of(engine, batch: Batch, mesh: ProcessMesh, mine: list[int]) -> np.ndarray:
    """Returns the log-probs (A,) of the whole batch, as the controller of a run gathers them."""
    read = lambda model, row: model(row, temperature=TEMPERATURE).log_probs
    rows = [ExperienceRow.of(batch.select([i])).row for i in mine]
    own = {i: answer.numpy() for i, answer in zip(mine, engine.forward(rows, read), strict=True)}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    whole = {i: answer for part in everyone for i, answer in part.items()}
    return batch.put_together([[i] for i in whole], list(whole.values()))


def on_rank(spec: dict) -> dict:
    mesh = ProcessMesh.joined(sequence=spec.get("sequence", 1), tensor=spec.get("tensor", 1))
    batch = experiences()
    mine = list(range(mesh.data_rank, len(batch), mesh.data))
    rows = lambda batch: [ExperienceRow.of(batch.select([i])) for i in mine]
    engine = build_engine(
        lambda: policy(spec),
        backend=spec["backend"],
        optim=OptimConfig(adam=AdamConfig(lr=0.0), max_norm=0.0),
        ds=options_of(spec),
        total_steps=2,
        gradient_checkpointing=False,
        mesh=mesh,
    )
    expected, _ = step_with_gradients(engine, rows(batch), PolicyObjective(temperature=TEMPERATURE))
    log_probs = torch.from_numpy(log_probs_of(engine, batch, mesh, mine)).requires_grad_()
    (gradient,) = torch.autograd.grad(ppo(log_probs, batch), log_probs)
    given = replace(batch, advantages=gradient.numpy(), returns=gradient.numpy())
    found: dict[str, torch.Tensor] = {}
    engine.before_step = lambda: found.update(engine.gradients())
    engine.forward_backward((rows(given), GivenGradient(temperature=TEMPERATURE)))
    engine.optim_step()
    norm = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    error = sum(float((found[n] - g).double().square().sum()) for n, g in expected.items()) ** 0.5
    return {"norm": norm, "error": error / norm}
