"""Formulas of RL, checked by a second computation in the first steps (`--train.verify_steps`): the advantages
of a step, and the losses of policy and critic with their gradients, at made-up log-probs and values. They
equal those of `plain_rl`, whatever the model computes."""

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from openrlhf.training.invariants import broken
from openrlhf.training.objectives.critic import CriticObjective
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.training.plain_rl import PlainAdvantages, plain_policy_loss, plain_value_loss
from openrlhf.types import ExperienceRow, LossNorm, PackedRow, present

FORMULA = 1e-4
"""Largest relative difference between two formulas of a loss. They compute in float64, except for the KL to
the reference in float32."""
ADVANTAGE = 1e-4
"""Largest relative difference between two computations of advantages, beside the rounding of whitening."""
WAVE = 0.25
"""Distance in nats of the log-probs of a checked loss from those before the update, more than clip ranges."""


def check_policy_loss(objective: PolicyObjective, row: ExperienceRow, step: int) -> None:
    """Checks the policy's loss of a row, and its gradient, at log-probs around those before the update."""
    base = row.rollout_log_probs if row.old_log_probs is None else row.old_log_probs
    entropy = 1 + _waves(base)

    def output(log_probs: Tensor) -> Callable:
        def model(row: PackedRow, temperature: float, with_entropy: bool) -> SimpleNamespace:
            return SimpleNamespace(log_probs=log_probs, entropy=entropy if with_entropy else None)

        return model

    _check_formula(
        "the policy's loss",
        lambda x, row, norm: objective(output(x), row, norm)[0],
        lambda x, row, norm: plain_policy_loss(objective, row, norm, x, entropy),
        row,
        base,
        step,
    )


def check_value_loss(objective: CriticObjective, row: ExperienceRow, step: int) -> None:
    """Checks the critic's loss of a row, and its gradient, at values around those before the update."""
    _check_formula(
        "the critic's loss",
        lambda x, row, norm: objective(lambda row: x, row, norm)[0],
        lambda x, row, norm: plain_value_loss(objective, row, norm, x),
        row,
        present(row.values),
        step,
    )


def _check_formula(
    name: str,
    loss_of: Callable[[Tensor, ExperienceRow, LossNorm], Tensor],
    plain_of: Callable[[Tensor, ExperienceRow, LossNorm], Tensor | None],
    row: ExperienceRow,
    base: Tensor,
    step: int,
) -> None:
    """Compares a loss with a plain formula in float64, at inputs (A,) near `base`."""
    floats = {f.name: getattr(row, f.name) for f in fields(row) if f.name != "row"}
    is_float = lambda value: isinstance(value, Tensor) and value.is_floating_point()
    row = replace(row, **{name: value.double() for name, value in floats.items() if is_float(value)})
    norm = LossNorm(2.0 * len(base), 2.0 * row.num_sequences)
    results = []
    for compute in (loss_of, plain_of):
        given = (base.double() + WAVE * _waves(base)).requires_grad_()
        if (loss := compute(given, row, norm)) is None:
            return
        if loss.requires_grad:
            loss.backward()
        results.append((loss.detach(), torch.zeros_like(given) if given.grad is None else given.grad))
    (loss, gradient), (expected, expected_gradient) = results
    size = float((expected_gradient.abs() * (1 + base.abs())).sum()) + float(expected.abs())
    causes = "The objective computes another formula than its paper, or divides by other totals."
    if not abs(float(loss - expected)) <= FORMULA * size:
        raise broken(step, f"{name} of a row", f"{float(loss):.6g}", f"{float(expected):.6g}", causes)
    difference = (gradient - expected_gradient).abs()
    if not float(difference.max()) <= FORMULA * float(expected_gradient.abs().max()):
        i = int(difference.argmax())
        quantity = f"the derivative of {name} by action {i} of a row"
        raise broken(
            step, quantity, f"{float(gradient[i]):.6g}", f"{float(expected_gradient[i]):.6g}", causes
        )


def _waves(base: Tensor) -> Tensor:
    """Returns numbers between -1 and 1 without a pattern, (A,) float64, the same in every run."""
    return (torch.arange(1, len(base) + 1, dtype=torch.float64) ** 2).sin()


def check_advantages(found: np.ndarray, plain: PlainAdvantages | None, step: int) -> None:
    """Checks the advantages (A,) of a step against those of `plain_advantages`."""
    if plain is None or not len(found):
        return
    difference = np.abs(found - plain.values)
    if not difference.max() <= plain.rounding + ADVANTAGE * float(np.abs(plain.values).max()):
        i = int(difference.argmax())
        causes = (
            "Rewards were given to other samples, compared in other groups, clipped or discounted in another "
            "way, or whitened over other actions."
        )
        quantity = f"the advantage of action {i} of the step"
        raise broken(step, quantity, f"{found[i]:.6g}", f"{plain.values[i]:.6g}", causes)
