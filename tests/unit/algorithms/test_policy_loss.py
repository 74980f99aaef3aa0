import math

import pytest
import torch
from records import row_view

from openrlhf.algorithms.log_ratio import sequence_log_ratio, token_log_ratio
from openrlhf.algorithms.policy_losses.cispo import CISPO
from openrlhf.algorithms.policy_losses.ppo import PPO

COUNTS = torch.tensor([2, 0, 1])


def clipped(ratio, advantages, **bounds):
    """Computes PPO's surrogate, which does not look at the log-probs themselves."""
    log_ratio = torch.tensor(ratio).log()
    return PPO()(row_view(torch.zeros(len(ratio)), log_ratio, torch.tensor(advantages), **bounds))


def test_clipped_loss_by_hand():
    loss, at_low, at_high = clipped(
        [1.5, 1.5, 0.5, 0.5, 1.0, 9.0], [1.0, -1.0, 1.0, -1.0, 2.0, 0.0], clip_low=0.2, clip_high=0.3
    )
    # min(1.5, 1.3), min(-1.5, -1.3), min(0.5, 0.8), min(-0.5, -0.8), no clip, nothing to clip
    assert loss.tolist() == pytest.approx([-1.3, 1.5, -0.5, 0.8, -2, 0])
    assert at_high.tolist() == [True, False, False, False, False, False]
    assert at_low.tolist() == [False, False, False, True, False, False]


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    loss, _, _ = clipped([5.0, 5.0, 0.9], [-1.0, 1.0, -1.0], clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    # max(min(-5, -1.2), 3 * -1) = -3; min(5, 1.2) = 1.2; max(-0.9, -3) = -0.9
    assert loss.tolist() == pytest.approx([3, -1.2, 0.9])


def test_gradient_vanishes_where_clipped():
    log_probs = torch.tensor([math.log(1.5), math.log(1.5)], requires_grad=True)
    loss, _, _ = PPO()(row_view(log_probs, log_probs, torch.tensor([1.0, -1.0])))
    loss.sum().backward()
    # d(-ratio * A) / dlog_prob = -ratio * A
    assert log_probs.grad.tolist() == pytest.approx([0, 1.5])


def test_cispo_by_hand():
    log_probs = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    ratio, advantages = torch.tensor([1.5, 0.5, 1.0, 1.5]), torch.tensor([1.0, 2.0, -1.0, -2.0])
    old_log_probs = log_probs.detach() - ratio.log()
    loss, at_low, at_high = CISPO()(row_view(log_probs, log_probs - old_log_probs, advantages, clip_high=0.3))
    # weights 1.3, 0.8, 1, 1.3; the loss is -weight * A * log pi
    assert loss.tolist() == pytest.approx([1.3, 0.8 * 2 * 2, -3, -1.3 * 2 * 4])
    # the sign of the advantage does not matter
    assert at_low.tolist() == [False, True, False, False]
    assert at_high.tolist() == [True, False, False, True]
    loss.sum().backward()
    # -weight * A, also where a bound is active: the weight itself has no gradient
    assert log_probs.grad.tolist() == pytest.approx([-1.3, -1.6, 1, 2.6])


def test_cispo_without_a_lower_bound():
    log_ratio = torch.tensor([-20.0, math.log(3.0), 20.0])
    loss, at_low, _ = CISPO()(row_view(-torch.ones(3), log_ratio, torch.ones(3), clip_low=1.0, clip_high=4.0))
    assert loss.tolist() == pytest.approx([math.exp(-20), 3, 5])
    assert not at_low.any()


def test_token_ratio_is_clamped():
    ratio = token_log_ratio(torch.tensor([-1.0, 0.0, -500.0]), torch.tensor([-2.0, -500.0, 0.0]), COUNTS)
    assert ratio.tolist() == [1, 20, -20]


def test_sequence_ratio():
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    ratio = sequence_log_ratio(log_probs, torch.tensor([-2.0, -5.0, -2.0]), COUNTS)
    # (1 + 3) / 2 on both actions of the first sequence, -1 on the last sequence's
    assert ratio.tolist() == [2, 2, -1]
    ratio[0].backward()
    assert log_probs.grad.tolist() == [0.5, 0.5, 0]


def test_sequence_ratio_is_clamped():
    ratio = sequence_log_ratio(torch.tensor([0.0, 0.0, 0.0]), torch.tensor([-90.0, -110.0, -1.0]), COUNTS)
    assert ratio.tolist() == [20, 20, 1]
    assert ratio.exp().isfinite().all()
