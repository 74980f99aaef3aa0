import math

import pytest
import torch

from openrlhf.algorithms.kl import KL_ESTIMATORS, KLController, approx_kl, unbiased_gradient


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


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_the_unbiased_gradient_is_that_of_the_kl_over_all_outcomes(name):
    """The average over all outcomes, weighted by the policy that sampled, equals autograd's gradient of the
    exact divergence, before the policy moves away from the one that sampled and after that."""
    ref, old = torch.tensor([0.2, 0.5, 0.3]).log(), torch.tensor([0.4, 0.35, 0.25]).log()
    for start in (old, torch.tensor([0.6, 0.3, 0.1]).log()):
        logits = start.clone().requires_grad_()
        log_probs = logits.log_softmax(0)
        exact = (log_probs.exp() * (log_probs - ref)).sum()
        (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
        value = approx_kl(log_probs, ref, name)
        kl = unbiased_gradient(value, log_probs, ref, old)
        assert kl.tolist() == value.tolist()
        (found,) = torch.autograd.grad((old.exp() * kl).sum(), logits)
        assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_weight_of_the_unbiased_gradient_is_at_most_10():
    log_probs = torch.tensor([0.0], requires_grad=True)
    unbiased_gradient(torch.zeros(1), log_probs, torch.tensor([-1.0]), torch.tensor([-5.0])).sum().backward()
    assert log_probs.grad.tolist() == [10]
