"""Tests users' algorithm classes with a few samples before a run starts."""

from collections.abc import Callable

import torch
from torch import Tensor

from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.corrections.base import Correction, SamplerMismatch
from openrlhf.algorithms.curricula import Curriculum
from openrlhf.algorithms.policy_losses.base import PolicyLoss, RowView
from openrlhf.algorithms.proximal.base import ProximalPolicy
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.registry import Selectable
from openrlhf.rows import LossNorm
from openrlhf.types import Prompt

COUNTS = ([2, 0, 3, 1], [0])
"""Numbers of actions of the sequences of two rows. The second row has no action, which can happen on a
rank."""


def try_out(build: Callable[[], Selectable]) -> None:
    """Calls an instance as a run does. Raises UsageError if a result differs from what the base class
    specifies; errors of the instance are passed on.

    Args:
        build: returns a new instance with its options.
    """
    kind = build()
    if isinstance(kind, AdvantageEstimator):
        _try_estimator(kind)
        build_again = build()
        assert isinstance(build_again, AdvantageEstimator)
        if state := kind.state_dict():
            build_again.load_state_dict(state)
        return
    if isinstance(kind, Curriculum):
        _try_curriculum(kind)
    for counts in COUNTS:
        if isinstance(kind, PolicyLoss):
            _try_loss(kind, torch.tensor(counts))
        elif isinstance(kind, Correction):
            _try_correction(kind, torch.tensor(counts))
        elif isinstance(kind, ProximalPolicy):
            _try_proximal(kind, sum(counts))


def _try_estimator(estimator: AdvantageEstimator) -> None:
    """Calls an estimator with samples of two prompts, one of which has a single sample."""
    counts = torch.tensor(COUNTS[0])
    values = _numbers(6) if estimator.needs_critic else None
    step = StepView(
        rewards=torch.tensor([1.0, 0.0, -2.0, 0.5]),
        group_ids=torch.tensor([0, 1, 0, 0]),
        named_rewards={"score": torch.tensor([1.0, 0.0, -2.0, torch.nan])},
        lengths=counts,
        turns=torch.ones_like(counts),
        truncated=counts == 3,
        episodes=torch.arange(4),
        counts=counts,
        log_probs=_numbers(6) if estimator.needs_log_probs else None,
        rollout_log_probs=_numbers(6),
        ref_log_probs=None,
        values=values,
        gamma=1.0,
        lambd=1.0,
    )
    _check_floats("shape", estimator.shape(step), 4)
    answer = estimator.advantages(_numbers(6), step)
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise _broken("advantages() must return a pair: advantages and returns, both (A,)")
    for name, found in zip(("the advantages", "the returns"), answer, strict=True):
        _check_floats(name, found, 6)


def _try_curriculum(curriculum: Curriculum) -> None:
    """Asks for one of three prompts, tells its scores, and restores the state."""
    curriculum.prompts, curriculum.seed = [Prompt(prompt_id=i, text="") for i in range(3)], 0
    if (chosen := curriculum.choose()) not in range(3):
        raise _broken(f"choose() must return the index of one of three prompts, 0 to 2, and not {chosen}")
    curriculum.observe(chosen, [0.0, 1.0])
    curriculum.load_state_dict(curriculum.state_dict())


def _try_loss(loss: PolicyLoss, counts: Tensor) -> None:
    num_actions = int(counts.sum())
    log_probs = _numbers(num_actions).requires_grad_()
    row = RowView(
        log_probs=log_probs,
        log_ratio=log_probs - log_probs.detach() + _numbers(num_actions) / 10,
        advantages=_numbers(num_actions) + 1.5,
        counts=counts,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0 if loss.dual_clip else None,
        proximal_log_probs=_numbers(num_actions),
        old_log_probs=None,
        rollout_log_probs=_numbers(num_actions),
        staleness=None,
        entropy=-log_probs if loss.needs_entropy else None,
        norm=LossNorm(6, 3),
    )
    answer = loss(row)
    if not (isinstance(answer, tuple) and len(answer) == 3):
        raise _broken(
            "the loss must return a triple, all (A,): loss, active lower bounds, active upper bounds"
        )
    _check_floats("the loss", answer[0], num_actions)
    if not answer[0].requires_grad:
        raise _broken("the loss has no gradient; compute it from log_probs or log_ratio")
    answer[0].sum().backward()
    _check_floats("the gradient of the loss", log_probs.grad, num_actions)
    for name, active in zip(("lower", "upper"), answer[1:], strict=True):
        if not isinstance(active, Tensor) or active.dtype != torch.bool or active.shape != (num_actions,):
            raise _broken(f"the active {name} bounds are not ({num_actions},) bool")


def _try_correction(correction: Correction, counts: Tensor) -> None:
    log_ratio = _numbers(int(counts.sum()))
    mismatch = SamplerMismatch(
        log_ratio=log_ratio,
        log_probs=2 * log_ratio,
        rollout_log_probs=log_ratio,
        counts=counts,
        bounds=(0.5, 5.0),
    )
    _check_floats("the weights", correction(mismatch), len(log_ratio))


def _try_proximal(proximal: ProximalPolicy, num_actions: int) -> None:
    log_probs = _numbers(num_actions)
    for staleness in (None, torch.arange(num_actions, dtype=torch.int32)):
        _check_floats("log pi_prox", proximal(log_probs, None, log_probs - 1, staleness), num_actions)


def _numbers(count: int) -> Tensor:
    """Returns (count,) distinct negative numbers."""
    return -1 - torch.arange(count) / 4


def _broken(text: str) -> UsageError:
    return UsageError(ErrorCode.USER_CODE, text)


def _check_floats(name: str, found: object, count: int) -> None:
    """Raises UsageError unless `found` is a tensor of `count` finite floats."""
    if not isinstance(found, Tensor):
        raise _broken(f"{name}: expected a tensor ({count},), got {type(found).__name__}")
    if found.shape != (count,) or not found.is_floating_point():
        raise _broken(f"{name}: expected ({count},) floats, got {tuple(found.shape)} {found.dtype}")
    if not found.isfinite().all():
        raise _broken(f"{name}: {found.tolist()} is not finite")
