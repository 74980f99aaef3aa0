"""Formulas of RL, checked by a second computation in the first steps (`--train.verify_steps`): advantages,
returns and metrics of a step and of synthetic samples, the KL coefficient, and the losses of policy and
critic with their gradients at synthetic numbers. They equal those of `tools.reference`, whatever the model
computes.

A step of a run seldom shows a wrong formula. In a first step the KL is 0, all samples are there, and each has
one sequence. So the synthetic samples have what a run meets later (`SYNTHETIC`)."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf.api import (
    Batch,
    CriticObjective,
    ExperienceRow,
    KLController,
    LossNorm,
    Metrics,
    Outcome,
    PackedRow,
    PolicyObjective,
    PPOConfig,
    Prompt,
    Trajectory,
    evaluation_metrics,
    not_none,
)
from openrlhf.api import runs_of_version as runs
from openrlhf.tools.reference.advantages import PlainAdvantages
from openrlhf.tools.reference.metrics import plain_evaluation_metrics
from openrlhf.tools.reference.policy import is_covered, plain_policy_loss, plain_value_loss
from openrlhf.tools.selftest.invariants import broken

FORMULA = 1e-4
"""Largest relative difference between two formulas of a loss. They compute in float64, except for the KL to
the reference in float32."""
ADVANTAGE = 1e-4
"""Largest relative difference between two computations of advantages, beside the rounding of whitening."""
NEAR, FAR = 0.25, 2.0
"""Distances in nats of the log-probs of a checked loss from those before the update, in turn: around the clip
ranges, and beyond dual clips. The same for the sampler's log-probs and the bounds of corrections."""


class MadeUp(NamedTuple):
    """A synthetic sequence for the check of advantages."""

    prompt: int
    sample: int
    reward: float
    length: int
    """Number of actions. Those of the longest response are added to a negative number."""
    is_truncated: bool = False
    turn_rewards: tuple[float, ...] = ()


SYNTHETIC = (
    MadeUp(0, 0, 1.5, 5),
    MadeUp(1, 1, -0.5, 3),  # its prompt's sample 0 failed
    MadeUp(2, 0, 0.9, 1),
    MadeUp(4, 0, 60.0, -1, is_truncated=True),
    MadeUp(2, 1, 0.9, 1),
    MadeUp(3, 2, 2.0, 2),  # no other sample of its prompt is left
    MadeUp(1, 2, 0.25, 7, turn_rewards=(0.5, -1.0, 0.75)),
    MadeUp(0, 2, -3.0, 0),
    MadeUp(2, 2, 0.9, 1),
    # an episode in two sequences: the last one has its reward and its ending
    MadeUp(0, 3, 0.0, 4, turn_rewards=(1.25, -0.5)),
    MadeUp(0, 3, 0.5, 2, is_truncated=True, turn_rewards=(0.25,)),
    MadeUp(1, 3, -1.25, 3),
    MadeUp(4, 1, -0.5, 3),
)
"""Samples of five prompts, not in the order of the prompts: groups of different sizes, equal rewards, whose
mean is another number in float32, an outlier, an answer without actions, and an episode in two sequences."""


def check_policy_loss(config: PPOConfig, kl_coef: float, row: ExperienceRow, step: int) -> None:
    """Checks the policy's loss of a row, and its gradient, at synthetic numbers; not losses of the user."""
    if not is_covered(config):
        return
    objective, expected = PolicyObjective.from_config(config, kl_coef), config.rollout.temperature
    size = len(row.rollout_log_probs)
    base = _waves(size, 1) - 2
    row = _with_synthetic(
        row,
        old_log_probs=base,
        rollout_log_probs=base + _near_and_far(size, 1) * _waves(size, 2),
        ref_log_probs=base + NEAR * _waves(size, 3),
        advantages=2 * _waves(size, 4),
        staleness=torch.arange(size, dtype=torch.int32) % 4,
    )
    entropy = 1 + _waves(size, 5)

    def of_likely(log_probs: Tensor) -> Tensor | None:
        if row.likely_log_probs is None:
            return None
        shape = row.likely_log_probs.shape
        return log_probs[:, None] / 8 + _waves(shape.numel(), 6).view(shape) / 2 - 1 - math.log(shape[1])

    def output(log_probs: Tensor) -> Callable:
        def model(
            row: PackedRow, temperature: float, with_entropy: bool, likely: Tensor | None = None
        ) -> SimpleNamespace:
            if temperature != expected:
                causes = "Log-probs of another distribution than that of the samples would be trained."
                raise broken(step, "the temperature of the policy's loss", temperature, expected, causes)
            return SimpleNamespace(
                log_probs=log_probs, entropy=entropy if with_entropy else None, likely=of_likely(log_probs)
            )

        return model

    _check_formula(
        "the policy's loss",
        lambda x, row, norm: objective(output(x), row, norm)[0],
        lambda x, row, norm: plain_policy_loss(config, row, norm, x, entropy, kl_coef, of_likely(x)),
        row,
        base,
        step,
    )


def check_value_loss(config: PPOConfig, row: ExperienceRow, step: int) -> None:
    objective = CriticObjective.from_config(config)
    size = len(row.rollout_log_probs)
    row = _with_synthetic(row, values=_waves(size, 1), returns=2 * _waves(size, 2))
    _check_formula(
        "the critic's loss",
        lambda x, row, norm: objective(lambda row: x, row, norm)[0],
        lambda x, row, norm: plain_value_loss(config, row, norm, x),
        row,
        not_none(row.values),
        step,
    )


def _check_formula(
    name: str,
    loss_of: Callable[[Tensor, ExperienceRow, LossNorm], Tensor],
    plain_of: Callable[[Tensor, ExperienceRow, LossNorm], Tensor],
    row: ExperienceRow,
    base: Tensor,
    step: int,
) -> None:
    """Compares a loss with a plain formula in float64, at inputs (A,) near `base`."""
    floats = {f.name: getattr(row, f.name) for f in fields(row) if f.name != "row"}
    is_float = lambda value: isinstance(value, Tensor) and value.is_floating_point()
    row = replace(row, **{name: value.double() for name, value in floats.items() if is_float(value)})
    totals = None if row.prompts is None else 2 * row.prompts.bincount(minlength=1)
    norm = LossNorm(2.0 * len(base), 2.0 * row.num_sequences, totals)
    results = []
    for compute in (loss_of, plain_of):
        given = (base.double() + _near_and_far(len(base), 2) * _waves(len(base))).requires_grad_()
        loss = compute(given, row, norm)
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


def _with_synthetic(row: ExperienceRow, **columns: Tensor) -> ExperienceRow:
    known: dict[str, Any] = {name: x for name, x in columns.items() if getattr(row, name) is not None}
    return replace(row, **known)


def _near_and_far(size: int, place: int) -> Tensor:
    """Returns the distances (size,) NEAR and FAR. FAR has this place, 0 to 2, among three."""
    return torch.where(torch.arange(size) % 3 == place, FAR, NEAR)


def _waves(size: int, kind: int = 0) -> Tensor:
    """Returns numbers (size,) float64 between -1 and 1 without a pattern; `kind` selects one of several."""
    return ((torch.arange(1, size + 1, dtype=torch.float64) + 37 * kind) ** 2).sin()


def synthetic_samples(
    like: Batch, longest: int, sources: Sequence[str] = ("default",)
) -> tuple[Batch, list[Trajectory]]:
    """Returns synthetic samples with synthetic numbers in the columns that the batch `like` has. `longest`:
    the number of actions of the longest response. `sources`: those of the prompts, in turn."""
    trajectories, parts = [], Counter()
    for made in SYNTHETIC:
        size = made.length if made.length >= 0 else longest + made.length
        starts = [1 + i * size // len(made.turn_rewards) for i in range(len(made.turn_rewards))]
        trajectories.append(
            Trajectory(
                prompt=Prompt(prompt_id=made.prompt, text="", source=sources[made.prompt % len(sources)]),
                sample_index=made.sample,
                part=parts[made.prompt, made.sample],
                outcome=Outcome.OK,
                reward=made.reward,
                score=made.reward,
                truncated=made.is_truncated,
                token_ids=np.zeros(1 + size, np.int32),
                action_mask=np.arange(1 + size) > 0,
                rollout_log_probs=np.full(size, -1, np.float32),
                weight_versions=runs([0] * size),
                turn_starts=np.array(starts, np.int32),
                turn_rewards=np.array(made.turn_rewards, np.float32),
            )
        )
        parts[made.prompt, made.sample] += 1
    batch = Batch.of(trajectories)
    size = len(batch.rollout_log_probs)
    wave = lambda scale, kind: (scale * _waves(size, kind).numpy()).astype(np.float32)
    policy = wave(1, 1) - 2
    columns = {
        "log_probs": policy,
        "ref_log_probs": policy + wave(1, 2),
        "teacher_log_probs": policy + wave(1, 3),
        "values": wave(2, 4),
    }
    return replace(
        batch, **{name: x for name, x in columns.items() if getattr(like, name) is not None}
    ), trajectories


def check_advantages(
    batch: Batch, plain: PlainAdvantages | None, step: int, samples: str = "the step"
) -> None:
    """Checks the advantages and returns of a batch against those of `plain_advantages`. `samples`: what the
    batch has."""
    if plain is None or not len(batch.rollout_log_probs):
        return
    causes = (
        "Rewards were given to other samples, compared in other groups, penalised, clipped or discounted in "
        "another way, or whitened over other actions."
    )
    columns = (
        ("advantage", batch.advantages, plain.values, plain.rounding),
        ("return", batch.returns, plain.returns, plain.rounding_of_returns),
    )
    for name, found, expected, rounding in columns:
        difference = np.abs(not_none(found) - expected)
        if not difference.max() <= rounding + ADVANTAGE * float(np.abs(expected).max()):
            i = int(difference.argmax())
            quantity = f"the {name} of action {i} of {samples}"
            raise broken(step, quantity, f"{not_none(found)[i]:.6g}", f"{expected[i]:.6g}", causes)


def check_controller(controller: KLController, step: int) -> None:
    if controller.target is None:
        return
    for factor, horizons in ((0.0, 0.5), (1.1, 0.5), (10.0, 20.0), (0.0, 20.0)):
        found = controller.update(factor * controller.target, round(horizons * controller.horizon)).coef
        samples = round(horizons * controller.horizon) / controller.horizon
        expected = controller.coef * (1 + float(np.clip(factor - 1, -0.2, 0.2)) * min(samples, 1.0))
        if not abs(found - expected) <= FORMULA * controller.coef:
            quantity = f"the coefficient after a KL of {factor:g} times its target"
            causes = "--algo.kl.target and --algo.kl.horizon change the coefficient in another way."
            raise broken(step, quantity, f"{found:.6g}", f"{expected:.6g}", causes)


RELATIVE = 1e-3
"""Largest relative difference between two computations of a metric, at least one of which is in float32."""


def check_metrics(found: Metrics, expected: Metrics, step: int, samples: str = "the step") -> None:
    """Checks the metrics that `expected` has. `samples`: what they measure."""
    for name, value in expected.items():
        measured = found.get(name, math.nan)
        if not math.isclose(measured, value, rel_tol=RELATIVE, abs_tol=RELATIVE):
            causes = "It counts other samples or actions, or has another formula than its documentation."
            raise broken(step, f"{name} of {samples}", f"{measured:.6g}", f"{value:.6g}", causes)


def check_evaluation(metrics: Metrics, trajectories: Sequence[Trajectory], step: int) -> None:
    check_metrics(metrics, plain_evaluation_metrics(trajectories), step, "the evaluation")
    synthetic = list(synthetic_evaluation())
    check_metrics(
        evaluation_metrics(synthetic), plain_evaluation_metrics(synthetic), step, "synthetic samples"
    )


def synthetic_evaluation() -> Iterable[Trajectory]:
    """Yields samples of prompts of two sources, of which some failed and some have two sequences."""
    scores = {
        ("math", 0): (1.0, 0.0, 0.0, 1.0),
        ("code", 1): (0.25, None, 0.5, -1.0),
        ("math", 2): (None, None, 0.0, None),
        ("code", 3): (2.0, 0.5, 0.75, 0.0),
        ("math", 4): (None, None, None, None),
    }
    for (source, prompt_id), of_prompt in scores.items():
        for i, score in enumerate(of_prompt):
            for part in range(2 if i == 0 else 1):
                yield Trajectory(
                    prompt=Prompt(prompt_id=prompt_id, text="", source=source),
                    sample_index=i,
                    part=part,
                    outcome=Outcome.OK if score is not None else Outcome.REWARD_ERROR,
                    reward=score,
                    score=score,
                    token_ids=np.arange(3, dtype=np.int32),
                    action_mask=np.arange(3) > 0,
                    rollout_log_probs=np.full(2, -1, np.float32),
                    weight_versions=runs([0, 0]),
                )
