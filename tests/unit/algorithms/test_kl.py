import math

import pytest
import torch

from openrlhf.algorithms.kl import KL_ESTIMATORS, KLController, approx_kl


def test_estimators_by_hand():
    log_probs, ref = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0])  # d = 1, -2
    assert approx_kl(log_probs, ref, "k1").tolist() == [1, -2]
    assert approx_kl(log_probs, ref, "k2").tolist() == [0.5, 2]
    # exp(-1) - 1 + 1 and exp(2) - 1 - 2
    assert approx_kl(log_probs, ref, "k3").tolist() == pytest.approx([math.exp(-1), math.exp(2) - 3])


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_extreme_ratios_stay_finite(name):
    log_probs = torch.tensor([-1000.0, 0.0], requires_grad=True)
    kl = approx_kl(log_probs, torch.tensor([0.0, -1000.0]), name)
    assert kl.abs().tolist() == [10, 10]
    kl.sum().backward()
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_an_action_that_is_impossible_for_one_policy_has_a_finite_gradient(name):
    log_probs = torch.tensor([-1.0, -torch.inf], requires_grad=True)
    kl = approx_kl(log_probs, torch.tensor([-torch.inf, -1.0]), name)
    assert kl.abs().tolist() == [10, 10]
    kl.sum().backward()
    assert log_probs.grad.tolist() == [0, 0]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_estimators_average_to_the_kl_of_close_distributions(name):
    """The average is over all outcomes, weighted by the policy. k2 is only close, the others are exact."""
    policy, ref = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.45, 0.33, 0.22])
    exact = (policy * (policy / ref).log()).sum().item()
    estimate = (policy * approx_kl(policy.log(), ref.log(), name)).sum().item()
    assert estimate == pytest.approx(exact, rel=0.1 if name == "k2" else 1e-4)


def test_fixed_coefficient():
    fixed = KLController(coef=0.1)
    assert fixed.update(kl=99.0, num_samples=1000) == fixed


def test_adaptive_coefficient():
    adaptive = KLController(coef=0.1, target=2.0, horizon=1000)
    # kl / target - 1 = 0.1, and 0.1 * (1 + 0.1 * 500 / 1000)
    assert adaptive.update(kl=2.2, num_samples=500).coef == pytest.approx(0.105)
    # the error is clipped to [-0.2, 0.2]
    assert adaptive.update(kl=99, num_samples=500).coef == pytest.approx(0.11)
    assert adaptive.update(kl=0, num_samples=500).coef == pytest.approx(0.09)
    assert adaptive.coef == 0.1


@pytest.mark.parametrize("num_samples", [1000, 1001, 8192, 10**9])
def test_the_coefficient_changes_by_a_fifth_a_step_at_most(num_samples):
    """With a step of many horizons the coefficient still never turns negative, which would pay for leaving
    the reference."""
    adaptive = KLController(coef=0.1, target=2.0, horizon=1000)
    assert adaptive.update(kl=0.0, num_samples=num_samples).coef == pytest.approx(0.08)
    assert adaptive.update(kl=99.0, num_samples=num_samples).coef == pytest.approx(0.12)
