import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import step_view
from torch import Tensor

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.advantages.groups import center, group_std, is_singleton
from openrlhf.algorithms.advantages.returns import discounted_returns, token_rewards
from openrlhf.algorithms.advantages.returns import generalized_advantages as gae

COMPARING = [name for name, kind in ESTIMATORS.items() if kind.needs_group]


def shape(name: str, rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns the rewards as an estimator shapes them."""
    return ESTIMATORS[name]().shape(step_view(rewards, group_ids))


REWARDS = torch.tensor([1.0, 5.0, 2.0, 6.0])
# Samples 0, 2, 3 belong to one prompt; sample 1 is the only one left of another group.
GROUPS = torch.tensor([7, 3, 7, 7])


def test_leave_one_out():
    # 1 - (2 + 6) / 2, alone, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    assert shape("rloo", REWARDS, GROUPS).tolist() == [-3, 0, -1.5, 4.5]


def test_center():
    # the mean of 1, 2, 6 is 3
    assert center(REWARDS, GROUPS).tolist() == [-2, 0, -1, 3]


def test_standardize():
    # deviations -2 -1 3, unbiased variance (4 + 1 + 9) / 2 = 7
    expected = [-2 / math.sqrt(7), 0, -1 / math.sqrt(7), 3 / math.sqrt(7)]
    assert shape("group_norm", REWARDS, GROUPS).tolist() == pytest.approx(expected)
    assert group_std(REWARDS, GROUPS).tolist() == pytest.approx([math.sqrt(7), 0, math.sqrt(7), math.sqrt(7)])


def test_the_mean_of_the_step_is_a_baseline_of_all_prompts():
    assert shape("flash_reinforce", REWARDS, GROUPS).tolist() == [-2.5, 1.5, -1.5, 2.5]  # the mean is 3.5
    assert shape("flash_reinforce", torch.full((7,), 0.1), torch.arange(7)).tolist() == [0] * 7


def test_without_peers():
    assert is_singleton(GROUPS).tolist() == [False, True, False, False]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1000.1])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_earn_nothing(reward, size):
    """A standard deviation that is rounding alone, near 0, is no divisor."""
    rewards, groups = torch.full((size,), reward), torch.zeros(size, dtype=torch.long)
    for name in COMPARING:
        assert shape(name, rewards, groups).abs().max().item() < 1e-4


@settings(deadline=None, max_examples=50)
@given(
    data=st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(0, 3)), min_size=1, max_size=12),
    name=st.sampled_from(COMPARING),
)
def test_groups_do_not_mix_and_order_does_not_matter(data, name):
    rewards, groups = torch.tensor([r for r, _ in data]), torch.tensor([g for _, g in data])
    shaped = shape(name, rewards, groups)
    for group in groups.unique():
        alone = shape(name, rewards[groups == group], groups[groups == group])
        assert torch.equal(shaped[groups == group], alone)
        assert alone.sum().item() == pytest.approx(0, abs=1e-4)
    assert torch.allclose(shape(name, rewards.flip(0), groups.flip(0)).flip(0), shaped, atol=1e-6)


def test_token_rewards():
    kl = torch.tensor([1.0, 2.0, 3.0, 4.0])
    # two actions, none, two actions; coefficient 0.5
    per_token = token_rewards(torch.tensor([10.0, 99.0, 20.0]), kl, torch.tensor([2, 0, 2]), 0.5)
    assert per_token.tolist() == [-0.5, 10 - 1, -1.5, 20 - 2]


def test_discounted_returns():
    rewards, counts = torch.tensor([1.0, 0.0, 4.0, 2.0, 6.0]), torch.tensor([3, 0, 2])
    # 1 + 0.5 (0 + 0.5 * 4) = 2, 0 + 0.5 * 4 = 2, 4; a sequence without actions; then 2 + 0.5 * 6 = 5, 6
    assert discounted_returns(rewards, counts, 0.5).tolist() == [2, 2, 4, 5, 6]
    assert discounted_returns(torch.zeros(0), torch.tensor([0, 0]), 0.5).shape == (0,)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 1.5, -2.0])), min_size=1, max_size=6))
def test_rewards_of_whole_sequences_are_the_return_of_every_action(sequences):
    counts, outcomes = (torch.tensor(x) for x in zip(*sequences, strict=True))
    rewards = token_rewards(outcomes, torch.zeros(int(counts.sum())), counts, kl_coef=0.1)
    wanted = [outcome for size, outcome in sequences for _ in range(size)]
    assert discounted_returns(rewards, counts, 1.0).tolist() == wanted
    elsewhere = rewards.clone()  # a reward in the middle is computed in another way
    elsewhere[:1] += 1
    plain = torch.cat([r.flip(0).cumsum(0).flip(0) for r in elsewhere.split(counts.tolist())])
    assert torch.equal(discounted_returns(elsewhere, counts, 1.0), plain)


def test_gae():
    rewards = torch.tensor([0.0, 0.0, 8.0, 0.0, 4.0])
    values = torch.tensor([1.0, 2.0, 4.0, 2.0, 2.0])
    advantages, returns = gae(rewards, values, torch.tensor([3, 2, 0]), gamma=0.5, lambd=0.5)
    # the first: deltas 0.5*2 - 1 = 0, 0.5*4 - 2 = 0, 8 - 4 = 4; A = 4, 0 + 0.25*4 = 1, 0 + 0.25*1 = 0.25
    # the second: deltas 0.5*2 - 2 = -1, 4 - 2 = 2; A = 2, -1 + 0.25*2 = -0.5
    assert advantages.tolist() == [0.25, 1, 4, -0.5, 2]
    assert returns.tolist() == [1.25, 3, 8, 1.5, 4]


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    lambd=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 100),
)
def test_sequences_do_not_mix(sizes, gamma, lambd, seed):
    """A sequence beside others has the returns and advantages that it has alone."""
    random = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(sizes), generator=random)
    counts = torch.tensor(sizes)
    advantages, returns = gae(rewards, values, counts, gamma, lambd)
    discounted = discounted_returns(rewards, counts, gamma)
    alone = zip(*(x.split(sizes) for x in (rewards, values, advantages, returns, discounted)), strict=True)
    for r, v, *found in alone:
        own = torch.tensor([len(r)])
        expected = (*gae(r, v, own, gamma, lambd), discounted_returns(r, own, gamma))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_gae_with_lambda_1_is_returns_minus_values():
    torch.manual_seed(0)
    rewards, values, counts = torch.randn(18), torch.randn(18), torch.tensor([6, 1, 0, 11])
    advantages, returns = gae(rewards, values, counts, gamma=0.9, lambd=1.0)
    assert torch.allclose(returns, discounted_returns(rewards, counts, 0.9), atol=1e-6)
    assert torch.allclose(advantages, returns - values)
