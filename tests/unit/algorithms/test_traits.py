"""The row of an algorithm states what its function does, and the help of the flags says the same."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import row_view, step_view

from openrlhf.algorithms import kl
from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.corrections.base import SamplerMismatch
from openrlhf.algorithms.log_ratio import LOG_RATIOS
from openrlhf.algorithms.policy_losses import POLICY_LOSSES
from openrlhf.algorithms.proximal import PROXIMAL_POLICIES
from openrlhf.algorithms.reductions import AGGREGATIONS
from openrlhf.config.fields import convert, list_flags
from openrlhf.config.ppo import PPOConfig

HELP = {key: field.help for key, field in list_flags(PPOConfig).items()}


@settings(deadline=None, max_examples=50)
@given(
    data=st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(0, 3)), min_size=1, max_size=12),
    gifts=st.lists(st.integers(-8, 8), min_size=4, max_size=4),
    name=st.sampled_from([name for name, kind in ESTIMATORS.items() if kind.needs_group]),
)
def test_what_a_whole_group_earns_teaches_nothing(data, gifts, name):
    groups, shape = (
        torch.tensor([g for _, g in data]),
        lambda r: ESTIMATORS[name]().shape(step_view(r, groups)),
    )
    rewards = torch.tensor([r for r, _ in data], dtype=torch.float64).round()  # float64 is exact for these
    torch.testing.assert_close(shape(rewards + torch.tensor(gifts)[groups]), shape(rewards))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_dual_clip_is_read_where_it_says_so(name):
    surrogate = POLICY_LOSSES[name]()
    inputs = torch.zeros(1), torch.tensor([math.log(5)]), torch.tensor([-1.0])
    losses = [surrogate(row_view(*inputs, dual_clip=c))[0].item() for c in (None, 3.0)]
    assert (losses[0] != losses[1]) == POLICY_LOSSES[name].dual_clip


@pytest.mark.parametrize("ratio", LOG_RATIOS)
def test_the_ratio_of_a_sequence_is_the_same_on_each_of_its_actions(ratio):
    log_ratio = LOG_RATIOS[ratio](torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([2]))
    assert (log_ratio[0] == log_ratio[1]) == (ratio == "sequence")


@pytest.mark.parametrize("name", kl.KL_ESTIMATORS)
def test_an_estimate_with_a_gradient_pulls_towards_the_reference(name):
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    estimates = kl.approx_kl(log_probs, torch.full((3,), -math.log(3)), name)
    (gradient,) = torch.autograd.grad((log_probs.detach().exp() * estimates).sum(), logits)
    if kl.KL_ESTIMATORS[name].has_gradient:
        assert gradient[0] > 0.1 and gradient[2] < -0.1
    else:
        assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_bounds_of_sequences_are_read_where_it_says_so(name):
    gap = SamplerMismatch(
        log_ratio=torch.tensor([1.2, 1.2]).log(),
        log_probs=torch.tensor([1.2, 1.2]).log() - 1,
        rollout_log_probs=-torch.ones(2),
        counts=torch.tensor([2]),
        bounds=(0.5, 2.0),
    )
    weights = [CORRECTIONS[name]()(replace(gap, sequence_bounds=b)).tolist() for b in (None, (0.9, 1.1))]
    assert (weights[0] != weights[1]) == CORRECTIONS[name].drops_sequences


@pytest.mark.parametrize("name", PROXIMAL_POLICIES)
def test_the_proximal_policy_is_what_it_says(name):
    now, old, sampler = torch.tensor([[-1.0], [-2.0], [-3.0]])
    row = PROXIMAL_POLICIES[name]
    of = [row()(now, before, sampler, torch.tensor([2])).item() for before in (old, None)]
    assert (of[0] != of[1]) == row.needs_forward
    assert (of == [sampler.item()] * 2) == row.is_sampler


@pytest.mark.parametrize(
    ("key", "trait"), [("algo.advantage.gamma", "discounts"), ("algo.advantage.no_std_norm", "whiten")]
)
def test_flags_name_the_estimators_that_read_them(key, trait):
    named = {name for name in ESTIMATORS if re.search(rf"\b{name}\b", HELP[key])}
    assert named == {name for name, row in ESTIMATORS.items() if getattr(row, trait)}


def test_flags_say_what_each_choice_stands_for():
    for name, aggregation in AGGREGATIONS.items():
        assert f"{name}: {aggregation.summary}" in HELP["actor.loss_aggregation"]
    for name, estimator in ESTIMATORS.items():
        assert f"{name}: {estimator.summary.removesuffix('.')}." in HELP["algo.advantage.estimator"]
    field = list_flags(PPOConfig)["actor.loss_aggregation"]
    assert field.values == "{token_mean,sample_mean,prompt_mean,constant_length} | None"
    assert convert(["None"], field.type) is None
    with pytest.raises(ValueError, match="token_mean"):
        convert(["mean"], field.type)
