"""Rewards that become advantages, and what the losses make of them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import config_of, sample_of
from records import batch_of, by_sequence, trajectory

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.policy_losses import POLICY_LOSSES
from openrlhf.algorithms.reductions import AGGREGATIONS
from openrlhf.config.ppo import AdvantageConfig, AlgoConfig, KLConfig, RewardConfig
from openrlhf.rows import ExperienceRow, LossNorm
from openrlhf.training.advantages import compute_advantages
from openrlhf.training.evaluate import evaluation_metrics
from openrlhf.training.objectives.critic import CriticObjective
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.types import Batch, Metrics, Prompt, Trajectory, not_none


def trajectory_of(prompt: Prompt, i: int, reward: float, num_actions: int = 1) -> Trajectory:
    return trajectory(
        reward,
        prompt=prompt,
        sample_index=i,
        token_ids=[0] * (2 + num_actions),
        action_mask=[False] * 2 + [True] * num_actions,
    )


def credit_of(
    trajectories: Sequence[Trajectory],
    algo: AlgoConfig,
    *,
    log_ratio: float = 0.0,
    kl_coef: float = 0.0,
    reward: RewardConfig | None = None,
) -> tuple[Batch, Metrics]:
    """Returns the credit where the policy's log-prob of every action is -1, and the reference's `log_ratio`
    less."""
    batch = Batch.of(trajectories, by_prompt=True)
    ones = np.ones(batch.num_actions.sum(), np.float32)
    batch = replace(batch, log_probs=-ones, ref_log_probs=(-1 - log_ratio) * ones, values=ones / 2)
    return compute_advantages(
        batch,
        trajectories,
        estimator=algo.build_estimator(),
        algo=algo,
        reward=reward or RewardConfig(),
        kl_coef=kl_coef,
        max_new_tokens=8,
    )


MEAN_BASELINES = ["rloo", "reinforce_baseline", "group_norm", "dr_grpo"]
"""Estimators whose baseline weighs all samples of a prompt alike."""


@settings(deadline=None, max_examples=60)
@given(
    estimator=st.sampled_from(MEAN_BASELINES),
    groups=st.lists(
        st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(1, 6)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
)
def test_what_the_samples_of_a_prompt_earn_adds_up_to_nothing(estimator, groups):
    """The lengths do not matter: an advantage that is positive on average would only make samples
    likelier."""
    trajectories = [
        trajectory_of(Prompt(prompt_id=p, text=""), i, reward, length)
        for p, members in enumerate(groups)
        for i, (reward, length) in enumerate(members)
    ]
    algo = AlgoConfig(advantage=AdvantageConfig(estimator=estimator))
    batch, metrics = credit_of(trajectories, algo, reward=RewardConfig(clip_range=(-100, 100)))
    if ESTIMATORS[estimator].whiten:
        assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-5)
    returns = by_sequence(batch, not_none(batch.returns))
    for p in range(len(groups)):
        earned = [r[0] for r, t in zip(returns, trajectories, strict=True) if t.prompt.prompt_id == p]
        assert sum(earned) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("estimator", [name for name, row in ESTIMATORS.items() if row.whiten])
def test_whitened_advantages_have_the_mean_zero_over_actions(estimator):
    trajectories = [
        trajectory_of(Prompt(prompt_id=i // 2, text=""), i % 2, reward, n)
        for i, (reward, n) in enumerate([(3.0, 1), (5.0, 4), (2.0, 2), (9.0, 3)])
    ]
    _, metrics = credit_of(trajectories, AlgoConfig(advantage=AdvantageConfig(estimator=estimator)))
    assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-6)


def test_prompts_with_the_same_text_are_told_apart():
    """One is always solved and one never: as one prompt of four samples, two of them would have a solved one
    with 5/6, and every sample would differ from its group's mean."""
    prompts = [Prompt(prompt_id=i, text="the same") for i in range(2)]
    trajectories = [trajectory_of(p, i, float(p.prompt_id)) for p in prompts for i in range(2)]
    metrics = evaluation_metrics(trajectories)
    assert (metrics["eval/default_score_mean"], metrics["eval/default_best_of2"]) == (0.5, 0.5)
    batch, _ = credit_of(trajectories, AlgoConfig(advantage=AdvantageConfig(estimator="dr_grpo")))
    assert not_none(batch.advantages).tolist() == [0.0] * 4


@pytest.mark.parametrize("use_loss", [False, True])
def test_the_kl_counts_once(use_loss):
    """Two actions have a coefficient of 0.1 and a policy 2 nats above its reference: the KL costs each action
    0.2 of reward, or adds 0.1 * 2^2 / 2 to the loss, and never both."""
    kl = KLConfig(init_coef=0.1, use_loss=use_loss, estimator="k2" if use_loss else "k1")
    config = config_of(kl=kl, estimator="dr_grpo")
    trajectories = [trajectory_of(Prompt(prompt_id=0, text=""), i, 1.0, 2) for i in range(2)]
    batch, _ = credit_of(trajectories, config.algo, log_ratio=2.0, kl_coef=0.1)
    cost = 0.0 if use_loss else 0.2
    assert not_none(batch.advantages).tolist() == pytest.approx([-2 * cost, -cost] * 2)

    loss, _ = PolicyObjective.from_config(config, 0.1)(
        lambda row, temperature, with_entropy: SimpleNamespace(
            log_probs=torch.full((2,), -1.0), entropy=None
        ),
        ExperienceRow.of(batch_of(trajectories[:1], log_probs=-1.0, ref_log_probs=-3.0)),
        LossNorm(2, 1),
    )
    assert loss.item() == pytest.approx(0.1 * 2.0 if use_loss else 0.0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_rollout_without_a_single_action_makes_no_nan(estimator):
    """Every mean is over nothing, from credit to both losses and their metrics."""
    algo = AlgoConfig(advantage=AdvantageConfig(estimator=estimator), kl=KLConfig(use_loss=True))
    trajectories = [trajectory_of(Prompt(prompt_id=0, text=""), i, float(i), 0) for i in range(2)]
    batch, metrics = credit_of(trajectories, algo, kl_coef=0.1)
    row, values = ExperienceRow.of(batch), torch.zeros(0, requires_grad=True)
    norm = LossNorm(row.num_tokens, row.num_sequences, torch.zeros(1))
    assert (norm.num_tokens, norm.num_sequences) == (0, 0)
    answers = SimpleNamespace(log_probs=values, entropy=values)
    parts = [CriticObjective(value_clip=0.5)(lambda row: values, row, norm)]
    for aggregation in AGGREGATIONS:
        objective = PolicyObjective(
            aggregation=aggregation,
            correction="seq-mask-tis",
            kl_coef=0.1,
            kl_estimator="k3",
            entropy_coef=0.1,
        )
        parts.append(objective(lambda row, temperature, with_entropy: answers, row, norm))
    for loss, found in parts:
        loss.backward()
        assert loss.item() == 0 and set(map(float, found.values())) == {0.0}
    assert all(math.isfinite(value) for value in metrics.values()), metrics


@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
@pytest.mark.parametrize("loss_type", POLICY_LOSSES)
def test_policies_a_thousand_nats_apart_have_a_finite_loss_and_gradient(loss_type, correction):
    """Five sequences of two actions move the policy up and down from the old one and put the old one above
    and below the sampler; the last sequence does everything at once."""
    far = 1000.0
    log_probs = torch.tensor([far, far, -far, -far, 0, 0, 0, 0, far, -far], requires_grad=True)
    batch = replace(
        ExperienceRow.of(batch_of([sample_of(3)] * 5, log_probs=0.0)),
        rollout_log_probs=torch.tensor([0, 0, 0, 0, -far, -far, far, far, far, -far]),
        advantages=torch.tensor([-1.0, 1.0] * 5),
        ref_log_probs=torch.zeros(10),
    )
    objective = PolicyObjective(loss_type=loss_type, correction=correction, kl_coef=0.1, kl_estimator="k3")
    loss, metrics = objective(
        lambda row, temperature, with_entropy: SimpleNamespace(log_probs=log_probs, entropy=None),
        batch,
        LossNorm(10, 5),
    )
    loss.backward()
    assert log_probs.grad is not None and log_probs.grad.isfinite().all()
    assert all(value.isfinite() for value in (loss, *metrics.values()))
    if correction:
        assert metrics["policy/is_weight_mean"] <= objective.correction_high
