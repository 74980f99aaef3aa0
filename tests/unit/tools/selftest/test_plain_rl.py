"""The second computation of advantages and losses of RL, and its comparison with a run's own."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import count, product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import records
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import broken
from torch import Tensor

from openrlhf.algorithms import centering, reductions
from openrlhf.algorithms.advantages import ESTIMATORS, base, gae, groups, grpo, returns
from openrlhf.algorithms.advantages.base import StepView
from openrlhf.algorithms.corrections import tis
from openrlhf.algorithms.kl import KLController
from openrlhf.algorithms.policy_losses.base import RowView
from openrlhf.algorithms.policy_losses.ppo import PPO
from openrlhf.config.ppo import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    CriticConfig,
    KLConfig,
    PPOConfig,
    RewardConfig,
    RolloutConfig,
)
from openrlhf.rows import ExperienceRow, LossNorm
from openrlhf.tools.reference.advantages import plain_advantages
from openrlhf.tools.reference.policy import plain_policy_loss
from openrlhf.tools.selftest.verify_rl import (
    check_advantages,
    check_controller,
    check_policy_loss,
    check_value_loss,
    synthetic_samples,
)
from openrlhf.training import advantages
from openrlhf.training.objectives import critic
from openrlhf.training.objectives import policy as policy_objective
from openrlhf.training.objectives.critic import CriticObjective
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.types import Batch, Trajectory

COUNTS = [3, 0, 1, 6, 2]
LONGEST = 8
PENALTIES = {"overlong_buffer_len": 3, "stop_properly_penalty_coef": 0.5, "clip_range": (-2.0, 3.0)}


def samples(rewards: list[float], counts: list[int], truncated: int = 0) -> list[Trajectory]:
    """Returns samples of two prompts, taken in turn, the first `truncated` of which are truncated."""
    number = count()
    return [
        records.trajectory(
            reward,
            token_ids=range(n + 1),
            action_mask=[False] + [True] * n,
            sample_index=next(number),
            prompt_id=i % 2,
            truncated=i < truncated,
        )
        for i, (reward, n) in enumerate(zip(rewards, counts, strict=True))
    ]


def batch_of(trajectories: list[Trajectory], seed: int = 0) -> Batch:
    """Returns a batch with log-probs, those of a reference, values and staleness."""
    batch, rng = Batch.of(trajectories), np.random.default_rng(seed)
    column = lambda: (-3 * rng.random(batch.num_actions.sum())).astype(np.float32)
    log_probs = column()
    near = lambda: (log_probs + 0.3 * rng.standard_normal(len(log_probs))).astype(np.float32)
    return replace(
        batch,
        log_probs=log_probs,
        rollout_log_probs=near(),
        ref_log_probs=near(),
        values=column(),
        advantages=1 + column(),
        returns=column(),
        staleness=rng.integers(0, 4, len(log_probs)).astype(np.int32),
        prompts=np.repeat([t.prompt.prompt_id for t in trajectories], batch.num_actions).astype(np.int32),
    )


def row_of(**fields: None) -> ExperienceRow:
    return replace(ExperienceRow.of(batch_of(samples([0.0] * len(COUNTS), COUNTS))), **fields)


def assigned(batch: Batch, trajectories: list[Trajectory], **arguments) -> Batch:
    found, _ = advantages.compute_advantages(
        batch, trajectories, estimator=arguments["algo"].build_estimator(), **arguments
    )
    return found


FORMULAS = [
    {"estimator": name, "kl": estimator, "in_loss": in_loss, "gamma": gamma}
    for name, (estimator, in_loss, gamma) in product(
        ESTIMATORS, (("k1", False, 1.0), ("k2", True, 1.0), ("k3", False, 0.9))
    )
    if name in ("gae", "reinforce") or gamma == 1.0
]


def arguments_of(estimator: str, kl: str, in_loss: bool, gamma: float, reward: RewardConfig) -> dict:
    advantage = AdvantageConfig(estimator=estimator, gamma=gamma, lambd=0.95)
    algo = AlgoConfig(advantage=advantage, kl=KLConfig(estimator=kl, use_loss=in_loss))
    return {"algo": algo, "reward": reward, "kl_coef": 0.1, "max_new_tokens": LONGEST}


@pytest.mark.parametrize("formula", FORMULAS, ids=str)
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-20, 20, width=32), st.integers(0, LONGEST)), min_size=2, max_size=9).filter(
        lambda rows: sum(n for _, n in rows)
    ),
    st.integers(0, 9),
    st.booleans(),
)
def test_advantages_are_those_of_the_plain_formulas(
    formula: dict, rows: list[tuple[float, int]], truncated: int, has_penalties: bool
) -> None:
    reward = RewardConfig(**PENALTIES if has_penalties else {})
    trajectories = samples([r for r, _ in rows], [n for _, n in rows], truncated)
    batch, arguments = batch_of(trajectories), arguments_of(**formula, reward=reward)
    expected = plain_advantages(batch, trajectories, **arguments)
    assert expected is not None or formula["estimator"] == "group_norm"
    check_advantages(assigned(batch, trajectories, **arguments), expected, step=1)


def test_advantages_of_a_group_by_hand() -> None:
    """Samples of two prompts in turn: rewards 1, 0 and 4, 2."""
    trajectories = samples([1.0, 4.0, 0.0, 2.0], [1, 2, 1, 1])
    batch = batch_of(trajectories)
    named = {"kl": "k1", "in_loss": True, "gamma": 1.0, "reward": RewardConfig()}
    found = lambda name: plain_advantages(batch, trajectories, **arguments_of(name, **named)).values.tolist()
    assert found("dr_grpo") == [0.5, 1.0, 1.0, -0.5, -1.0]
    assert found("rloo") == [1.0, 2.0, 2.0, -1.0, -2.0]
    assert found("group_norm") == pytest.approx([0.5**0.5, 0.5**0.5, 0.5**0.5, -(0.5**0.5), -(0.5**0.5)])
    # 1, 4, 4, 0, 2: mean 2.2, variance 2.56
    assert found("reinforce") == pytest.approx([-0.75, 1.125, 1.125, -1.375, -0.125])


def test_sequences_of_an_episode_share_its_reward() -> None:
    """The first two sequences are one episode. Its reward is that of the last one; both are truncated like
    it, and the length of both counts."""
    trajectories = samples([0.0, 0.0, 4.0], [3, 2, 2])
    numbers = {"prompt": trajectories[0].prompt}
    trajectories = [
        replace(trajectories[0], sample_index=0),
        replace(trajectories[1], sample_index=0, reward=6.0, truncated=True, **numbers),
        replace(trajectories[2], sample_index=1, **numbers),
    ]
    reward = RewardConfig(overlong_buffer_len=4, stop_properly_penalty_coef=0.5)
    arguments = arguments_of("dr_grpo", "k1", True, 1.0, reward)
    batch = batch_of(trajectories)
    expected = plain_advantages(batch, trajectories, **arguments)
    # 5 actions of 8: (6 - 1/4) / 2 = 2.875; 4 is neither long nor truncated
    assert expected.values.tolist() == [-0.5625] * 5 + [0.5625] * 2
    check_advantages(assigned(batch, trajectories, **arguments), expected, step=1)


WRONG_ADVANTAGES = {
    "groups that are mixed": (grpo, "deviations", lambda rewards, groups: rewards - rewards.mean()),
    "a standard deviation that is left out": (grpo, "group_std", lambda rewards, groups: torch.ones(6)),
    "rewards that are not clipped": (advantages, "clip", lambda rewards, low, high: rewards),
    "rewards of single actions": (
        base,
        "discounted_returns",
        lambda rewards, counts, gamma: rewards,
    ),
    "a penalty with the wrong sign": (
        advantages,
        "token_rewards",
        lambda rewards, kl, counts, coef: returns.token_rewards(rewards, kl, counts, -coef),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_ADVANTAGES)
def test_wrong_advantages_are_found(wrong: str) -> None:
    trajectories = samples([9.0, 1.0, 0.0, 2.0, 0.0, 5.0], [2, 3, 1, 2, 2, 4])
    batch = batch_of(trajectories)
    reward = RewardConfig(clip_range=(-0.5, 0.5))
    arguments = arguments_of("group_norm", "k1", False, 1.0, reward)
    module, name, replacement = WRONG_ADVANTAGES[wrong]
    expected = plain_advantages(batch, trajectories, **arguments)
    with patch.object(module, name, replacement):
        found = assigned(batch, trajectories, **arguments)
    with broken() as refusal:
        check_advantages(found, expected, step=3)
    assert refusal.value.text.startswith("step 3: the advantage of action ")


def test_what_is_not_covered_is_not_compared() -> None:
    trajectories = samples([1.0, 0.0], [2, 2])
    batch = batch_of(trajectories)
    arguments = arguments_of("group_norm", "k1", False, 1.0, RewardConfig())
    own = replace(arguments["algo"].advantage, estimator="mine.py:Estimator")
    arguments["algo"] = replace(arguments["algo"], advantage=own)
    assert plain_advantages(batch, trajectories, **arguments) is None
    check_advantages(batch, None, step=1)


def test_small_differences_are_compared_unless_penalties_round_them() -> None:
    trajectories = samples([1.0, 0.0, 1.0 + 2**-23, 0.0], [3, 2, 4, 2])
    batch = batch_of(trajectories)
    arguments = arguments_of("group_norm", "k1", True, 1.0, RewardConfig())
    expected = plain_advantages(batch, trajectories, **arguments)
    assert expected.values[0] == pytest.approx(-(0.5**0.5), rel=0.02)
    check_advantages(assigned(batch, trajectories, **arguments), expected, step=1)
    penalty = RewardConfig(overlong_buffer_len=6, overlong_penalty_factor=1e-3)
    assert plain_advantages(batch, trajectories, **arguments | {"reward": penalty}) is None


def test_without_log_probs_rewards_have_no_kl() -> None:
    trajectories = samples([1.0, 4.0, 0.0, 2.0], [1, 2, 1, 1])
    batch = replace(batch_of(trajectories), log_probs=None)
    arguments = arguments_of("dr_grpo", "k1", False, 1.0, RewardConfig())
    expected = plain_advantages(batch, trajectories, **arguments)
    assert expected.values.tolist() == [0.5, 1.0, 1.0, -0.5, -1.0]
    check_advantages(assigned(batch, trajectories, **arguments), expected, step=1)


COLUMNS = ("log_probs", "ref_log_probs", "teacher_log_probs", "values")


def synthetic(missing: Collection[str] = (), longest: int = LONGEST) -> tuple[Batch, list[Trajectory]]:
    columns = {name: None if name in missing else np.zeros(1) for name in COLUMNS}
    return synthetic_samples(replace(batch_of(samples([0.0], [1])), **columns), longest)


@pytest.mark.parametrize("formula", FORMULAS, ids=str)
@pytest.mark.parametrize("reward", [RewardConfig(), RewardConfig(**PENALTIES)], ids=["", "penalties"])
@pytest.mark.few(10)
def test_advantages_of_synthetic_samples_are_those_of_the_plain_formulas(
    formula: dict, reward: RewardConfig
) -> None:
    arguments = arguments_of(**formula, reward=reward) | {"teacher_coef": 0.3}
    optional = set(COLUMNS) - {"values"}
    for missing, longest in ((), LONGEST), (optional, LONGEST), (("teacher_log_probs",), 1), ((), 4000):
        batch, trajectories = synthetic(missing, longest)
        arguments["max_new_tokens"] = longest
        expected = plain_advantages(batch, trajectories, **arguments)
        assert expected is not None
        check_advantages(assigned(batch, trajectories, **arguments), expected, step=1)


def mean_in_float32(rewards: Tensor, group_ids: Tensor) -> Tensor:
    totals, sizes = groups.group_sums(rewards, group_ids)
    return rewards - totals.float() / sizes


def groups_by_position(*args: Any, right: Callable = advantages.step_view, **kwargs: Any) -> StepView:
    step = right(*args, **kwargs)
    return replace(step, group_ids=torch.arange(len(step.rewards)) // 3)


def first_parts(
    batch: Batch, trajectories: Sequence[Trajectory], right: Callable = advantages.step_view, **rest: Any
) -> StepView:
    first = {t.sample: t.truncated for t in trajectories if t.is_first}
    return right(batch, [replace(t, truncated=first[t.sample]) for t in trajectories], **rest)


HIDDEN: dict[str, tuple[str, Any, str, Any]] = {
    "means in float32": ("group_norm", grpo, "deviations", mean_in_float32),
    "groups by position": ("dr_grpo", advantages, "step_view", groups_by_position),
    "truncation of the first sequence": ("dr_grpo", advantages, "step_view", first_parts),
    "no clipping": ("dr_grpo", advantages, "clip", lambda rewards, low, high: rewards),
    "no rewards of turns": ("reinforce", advantages, "rewards_of_earlier_turns", lambda trajectories: None),
    "returns without values": (
        "gae",
        gae,
        "generalized_advantages",
        lambda *args: (returns.generalized_advantages(*args)[0],) * 2,
    ),
    "a KL that is rewarded": (
        "dr_grpo",
        advantages,
        "token_rewards",
        lambda rewards, kl, counts, coef: returns.token_rewards(rewards, kl, counts, -coef),
    ),
}


@pytest.mark.parametrize("wrong", HIDDEN)
def test_synthetic_samples_show_what_a_first_step_hides(wrong: str) -> None:
    name, module, function, replacement = HIDDEN[wrong]
    arguments = arguments_of(name, "k1", False, 0.9, RewardConfig(**PENALTIES))
    batch, trajectories = synthetic()
    expected = plain_advantages(batch, trajectories, **arguments)
    with patch.object(module, function, replacement):
        found = assigned(batch, trajectories, **arguments)
    with broken() as refusal:
        check_advantages(found, expected, 1, "synthetic samples")
    assert "of synthetic samples" in refusal.value.text


TASKS: dict[str, dict[str, Any]] = {
    "estimator": {"a": "group_norm"},
    "kl_coef": {"a": 0.0, "b": 0.5},
    "overlong_buffer_len": {"a": 4},
    "overlong_penalty_factor": {"a": 2.0},
    "stop_properly_penalty_coef": {"a": -1.5},
}


@pytest.mark.parametrize("left_out", [None, *TASKS])
def test_tasks_have_values_of_their_own(left_out: str | None) -> None:
    """Prompts of three sources in turn; advantages that ignore a task's value are found."""
    arguments = arguments_of("dr_grpo", "k1", False, 1.0, RewardConfig(stop_properly_penalty_coef=0.5))
    like = batch_of(samples([1.0], [1]))
    batch, trajectories = synthetic_samples(like, LONGEST, ["default", "a", "b"])
    expected = plain_advantages(batch, trajectories, **arguments, tasks=TASKS)
    found = assigned(
        batch,
        trajectories,
        **arguments,
        tasks={key: {} if key == left_out else own for key, own in TASKS.items()},
    )
    if left_out is None:
        assert expected is not None
        check_advantages(found, expected, step=1)
    else:
        with broken():
            check_advantages(found, expected, step=1)


def test_a_wrong_change_of_the_kl_coefficient_is_found() -> None:
    controller = KLController(coef=0.1, target=0.2, horizon=100)
    check_controller(controller, step=1)
    check_controller(KLController(coef=0.1), step=1)
    check_controller(KLController(coef=0.0, target=0.2, horizon=100), step=1)
    unbounded = lambda self, kl, n: replace(self, coef=self.coef * (1 + 0.2 * n / self.horizon))
    with patch.object(KLController, "update", unbounded), broken():
        check_controller(controller, step=1)


LOSSES = ("ppo", "gspo", "cispo")
ANCHORS = ("recomputed", "rollout", "interpolated")
CORRECTIONS = (None, "tis", "icepop", "seq-mask-tis")
AGGREGATIONS = (None, "token_mean", "sample_mean", "prompt_mean", "constant_length")


def config_of(
    loss: str = "ppo",
    anchor: str = "recomputed",
    correction: str | None = None,
    aggregation: str | None = None,
    *,
    kl: KLConfig | None = None,
    actor: dict | None = None,
    **advantage: Any,
) -> PPOConfig:
    advantage |= {"proximal_policy": anchor, "is_correction_enable": correction is not None}
    if correction is not None:
        advantage["is_correction_type"] = correction
    return PPOConfig(
        actor=ActorConfig(policy_loss_type=loss, loss_aggregation=aggregation, **(actor or {})),
        algo=AlgoConfig(advantage=AdvantageConfig(**advantage), kl=kl or KLConfig()),
        rollout=RolloutConfig(max_new_tokens=LONGEST, temperature=0.7),
    )


@pytest.mark.parametrize("names", [*product(LOSSES, ANCHORS, CORRECTIONS, AGGREGATIONS)], ids=str)
@pytest.mark.few(40)
def test_policy_losses_are_those_of_the_plain_formula(names: tuple) -> None:
    bounds = {"is_correction_threshold": (0.8, 1.2)}
    plain = config_of(*names, actor={"eps_clip": 0.15}, **bounds)
    bounds |= {"staleness_decay": 0.9, "max_token_staleness": 2}
    rest = {"eps_clip_low_high": (0.1, 0.2), "dual_clip": 1.1, "entropy_coef": 0.01}
    kl = KLConfig(use_loss=True, estimator="k3")
    whole = config_of(*names, actor=rest, kl=kl, **bounds)
    by_sequence = config_of(*names, actor=rest, kl=kl, is_correction_sequence_threshold=(0.95, 1.1), **bounds)
    for config in (plain, whole, by_sequence):
        check_policy_loss(config, 0.1, row_of(), step=1)
    for row in (row_of(staleness=None), row_of(old_log_probs=None)):
        check_policy_loss(whole, 0.1, row, step=1)


GATES = [
    {"is_correction_level": level, "is_correction_gating": gating, "is_correction_threshold": bounds}
    for level in ("token", "seq")
    for gating, bounds in (("ratio", (0.8, 1.2)), ("ratio", (1.1,)), ("binary_kl", (0.01,)), ("tv", (0.05,)))
]
GATES.append({"is_correction_level": "token", "is_correction_mode": "clip"})
UPPER = {"is_correction_level": "off", "is_correction_threshold": (1.1,)}
GATES += [{"correction": name} | UPPER for name in CORRECTIONS if name]
KLS = {
    "in the reward": KLConfig(),
    "to the sampler": KLConfig(use_loss=True, estimator="k3", ref="rollout"),
    "with its own gradient": KLConfig(use_loss=True, estimator="k1", unbiased_gradient=True),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.few(20)
def test_gates_and_kls_are_those_of_the_plain_formula(loss: str, kl: str, gate: dict) -> None:
    for anchor in ("recomputed", "interpolated"):
        config = config_of(loss, anchor, kl=KLS[kl], **gate)
        for row in (row_of(), row_of(old_log_probs=None)):
            check_policy_loss(config, 0.1, row, step=1)


def row_with_likely_tokens(**columns: torch.Tensor | None) -> ExperienceRow:
    """Returns a row with four likely tokens of each action; the last one was dropped by top-p."""
    row = row_of(**columns)
    size = len(row.rollout_log_probs)
    likely = torch.linspace(-3.5, -1.5, 4 * size).view(size, 4).index_fill(1, torch.tensor(3), -torch.inf)
    return replace(row, likely_ids=torch.ones(size, 4).long(), likely_log_probs=likely)


CENTERED = [
    *(
        g
        for g in GATES
        if g["is_correction_level"] == "token" and g.get("is_correction_gating", "ratio") == "ratio"
    ),
    *({"correction": name} for name in (None, "tis", "icepop")),
]


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
@pytest.mark.parametrize("gate", CENTERED, ids=str)
def test_centered_scores_are_those_of_the_plain_formula(loss: str, gate: dict) -> None:
    bounds = {"is_correction_threshold": (0.8, 1.2), "staleness_decay": 0.9}
    config = config_of(loss, score_centering_top_k=4, **bounds | gate)
    row = row_with_likely_tokens(old_log_probs=None)
    masses = torch.linspace(-0.6, 0, len(row.rollout_log_probs))
    for each in (row, replace(row, row=replace(row.row, log_masses=masses))):
        check_policy_loss(config, 0.1, each, step=1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, q, *rest: centering.centering(p, q, None),  # without the correction and the nucleus
        lambda p, q, *rest: centering.centering(p, q.log_softmax(-1), *rest),  # renormalised
        lambda p, q, *rest: q.exp(),  # without the tail
    ],
)
def test_other_centerings_are_found(wrong: Callable) -> None:
    config = config_of(correction="tis", is_correction_threshold=(0.8, 1.2), score_centering_top_k=4)
    row = row_with_likely_tokens(old_log_probs=None)
    row = replace(row, row=replace(row.row, log_masses=torch.full_like(row.rollout_log_probs, -0.25)))
    with patch.object(policy_objective, "centering", wrong), broken():
        check_policy_loss(config, 0.1, row, step=1)


def plain_loss_of_an_action(config: PPOConfig, now: float, **columns: float) -> float:
    row = ExperienceRow.of(records.batch_of(samples([0.0], [1]), **columns))
    log_probs = torch.tensor([now], dtype=torch.float64)
    return float(plain_policy_loss(config, row, LossNorm(1, 1), log_probs, None, 0.0))


@pytest.mark.parametrize(("moved", "advantage"), [(30.0, -1.0), (-30.0, 1.0)])
def test_the_plain_formula_bounds_log_ratios(moved: float, advantage: float) -> None:
    loss = plain_loss_of_an_action(config_of(), -31.0, log_probs=-31.0 - moved, advantages=advantage)
    assert loss == pytest.approx(-advantage * math.exp(np.sign(moved) * 20))


@pytest.mark.parametrize(
    ("bounds", "loss"), [((1.0, 1.5), -2), ((0.5, 1.0), -2), ((1.1, 1.5), 0), ((0.5, 0.9), 0)]
)
def test_the_plain_formula_keeps_sequences_on_their_bounds(bounds: tuple, loss: float) -> None:
    config = config_of(correction="seq-mask-tis", is_correction_sequence_threshold=bounds)
    columns = {"log_probs": -1.0, "rollout_log_probs": -1.0, "advantages": 2.0}
    assert plain_loss_of_an_action(config, -1.0, **columns) == loss


def unbounded(self: PPO, row: RowView) -> tuple:
    losses = -row.log_ratio.exp() * row.advantages
    return losses, losses < 0, losses > 0


def detached(self: PPO, row: RowView, right: Callable = PPO.__call__) -> tuple:
    losses, low, high = right(self, row)
    return losses.detach(), low, high


WRONG_LOSSES: dict[str, tuple[str, Callable]] = {
    "no clip": ("loss", lambda: patch.object(PPO, "__call__", unbounded)),
    "no gradient": ("derivative", lambda: patch.object(PPO, "__call__", detached)),
    "a mean over the row": (
        "loss",
        lambda: patch.object(reductions, "token_mean", lambda loss, norm: loss.mean()),
    ),
    "no correction": (
        "loss",
        lambda: patch.object(tis.TIS, "__call__", lambda self, gap: torch.ones_like(gap.log_ratio)),
    ),
    "a correction without bounds": (
        "loss",
        lambda: patch.object(tis.TIS, "__call__", lambda self, gap: gap.log_ratio.exp()),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_LOSSES)
def test_wrong_policy_losses_are_found(wrong: str) -> None:
    kind, change = WRONG_LOSSES[wrong]
    config = config_of(correction="tis", kl=KLConfig(use_loss=True), actor={"eps_clip": 0.1})
    check_policy_loss(config, 0.1, row_of(), step=1)
    with change(), broken() as refusal:
        check_policy_loss(config, 0.1, row_of(), step=2)
    assert refusal.value.text.startswith("step 2: the ") and kind in refusal.value.text.partition(" is ")[0]


WRONG_SETTINGS = {
    "clip_low": 0.2,
    "clip_high": 0.1,
    "dual_clip": 1.05,
    "aggregation": "sample_mean",
    "correction": None,
    "correction_low": 0.0,
    "correction_high": 2.0,
    "proximal_policy": "rollout",
    "staleness_decay": 1.0,
    "max_staleness": None,
    "kl_coef": 0.0,
    "kl_estimator": "k2",
    "kl_to_sampler": True,
    "kl_unbiased_gradient": True,
    "entropy_coef": None,
    "temperature": 1.0,
}
"""Fields of the objective, and values that are not those of the flags."""


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_flags_that_do_not_reach_the_objective_are_found(name: str) -> None:
    rest = {"eps_clip_low_high": (0.1, 0.2), "entropy_coef": 0.01}
    bounds = {"staleness_decay": 0.9, "max_token_staleness": 2}
    kl = KLConfig(use_loss=True, estimator="k3")
    config = config_of(correction="tis", actor=rest, kl=kl, **bounds)
    check_policy_loss(config, 0.1, row_of(), step=1)
    wrong = replace(PolicyObjective.from_config(config, 0.1), **{name: WRONG_SETTINGS[name]})
    with patch.object(PolicyObjective, "from_config", lambda config, kl_coef: wrong), broken():
        check_policy_loss(config, 0.1, row_of(), step=1)


def test_a_wrong_loss_of_values_is_found() -> None:
    config = PPOConfig(critic=CriticConfig(value_clip=0.1))
    check_value_loss(config, row_of(), step=1)

    def unclipped(values, before, returns, clip):
        losses = (values - returns) ** 2 / 2
        return losses, losses < 0

    with patch.object(critic, "clipped_value_loss", unclipped), broken() as refusal:
        check_value_loss(config, row_of(), step=2)
    assert "the critic's loss" in refusal.value.text
    wrong = CriticObjective(value_clip=0.2)
    with patch.object(CriticObjective, "from_config", lambda config: wrong), broken():
        check_value_loss(config, row_of(), step=2)
