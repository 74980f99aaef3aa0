import math
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import records
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.config.ppo import AdvantageConfig, AlgoConfig, KLConfig, RewardConfig
from openrlhf.tools.doctor.health import Health
from openrlhf.training.advantages import compute_advantages, log_prob_metrics
from openrlhf.types import Batch, Metrics, Trajectory

INDICES = count()


def trajectory(reward: float, num_actions: int, mask: list[bool] | None = None, **fields) -> Trajectory:
    """Returns a sample with an episode of its own, unless `fields` name the episode that it is a part of."""
    mask = mask or [False] + [True] * num_actions
    options = {"token_ids": range(len(mask)), "action_mask": mask, "sample_index": next(INDICES)}
    return records.trajectory(reward, **(options | fields))


def assign(
    trajectories, *, log_ratio=0.0, reference=True, values=None, kl_coef=0.0, reward=None, tasks=None, **algo
) -> tuple[list[SimpleNamespace], Metrics]:
    """Returns the advantages and returns of each trajectory, and metrics. Every action has log-prob -1 and
    `log_ratio` to the reference."""
    batch = Batch.of(trajectories)
    log_probs = np.full(batch.num_actions.sum(), -1.0, np.float32)
    batch = replace(
        batch,
        log_probs=log_probs,
        ref_log_probs=log_probs - np.float32(log_ratio) if reference else None,
        values=np.array([v for own in values for v in own], np.float32) if values else None,
    )
    kl = KLConfig(use_loss=algo.pop("use_loss", False), estimator=algo.pop("kl_estimator", "k1"))
    config = AlgoConfig(advantage=AdvantageConfig(**algo), kl=kl)
    batch, metrics = compute_advantages(
        batch,
        trajectories,
        estimator=config.build_estimator(),
        algo=config,
        reward=reward or RewardConfig(),
        kl_coef=kl_coef,
        max_new_tokens=4,
        tasks=tasks or {},
    )
    assert batch.advantages.dtype == batch.returns.dtype == np.float32
    columns = (records.by_sequence(batch, c) for c in (batch.advantages, batch.returns))
    return [SimpleNamespace(advantages=a, returns=r) for a, r in zip(*columns, strict=True)], metrics


def advantages(credit):
    return [pytest.approx(c.advantages.tolist(), abs=1e-6) for c in credit]


def test_each_task_has_its_estimator_penalty_and_kl():
    """Two groups of rewards 0 and 2: math by Dr. GRPO with a KL coefficient 2, chat by GRPO, whose unbiased
    standard deviation is sqrt(2), after a penalty of 1 for the answer of 4 tokens; each action has the KL
    1/8. The run's coefficient is 1."""
    samples = [
        trajectory(0.0, 1, source="math"),
        trajectory(2.0, 4, source="chat", prompt_id=1),
        trajectory(2.0, 2, source="math"),
        trajectory(2.0, 1, source="chat", prompt_id=1),
    ]
    credit, metrics = assign(
        samples,
        estimator="group_norm",
        log_ratio=0.125,
        kl_coef=1.0,
        tasks={
            "estimator": {"math": "dr_grpo"},
            "kl_coef": {"math": 2.0},
            "overlong_buffer_len": {"chat": 2},
            "overlong_penalty_factor": {"chat": 1.0},
        },
    )
    scaled = 0.5 / math.sqrt(0.5)  # rewards 1 and 2 after the penalty
    assert credit[0].advantages == pytest.approx([-1 - 0.25], abs=1e-6)
    assert credit[2].advantages == pytest.approx([1 - 0.5, 1 - 0.25], abs=1e-6)
    assert credit[1].advantages == pytest.approx([-scaled - k / 8 for k in (4, 3, 2, 1)], abs=1e-6)
    assert credit[3].advantages == pytest.approx([scaled - 1 / 8], abs=1e-6)
    assert metrics["reward/mean"] == 1.25
    plain, _ = assign(samples, estimator="group_norm", log_ratio=0.125, kl_coef=1.0)
    assert plain[0].advantages == pytest.approx([-1 / math.sqrt(2) - 0.125], abs=1e-6)


def test_reward_pipeline_in_order():
    """Any other order of penalties, shaping, clip and KL gives other numbers."""
    credit, metrics = assign(
        [trajectory(4.0, 4, truncated=True), trajectory(0.0, 1)],
        estimator="dr_grpo",
        log_ratio=0.125,
        kl_coef=2.0,
        reward=RewardConfig(
            overlong_buffer_len=2,
            overlong_penalty_factor=1.0,
            stop_properly_penalty_coef=0.5,
            clip_range=(-0.5, 10),
        ),
    )
    # 4 actions of 4: 4 - 2/2 * 1 = 3; truncated: 0.5 * 3 = 1.5; mean 0.75: +0.75 and -0.75, clipped to -0.5
    # every action pays 2 * 0.125; returns are sums to the end
    assert advantages(credit) == [[-0.25, 0, 0.25, 0.5], [-0.75]]
    assert metrics["reward/mean"] == pytest.approx(0.75)
    assert metrics["reward/group_std"] == pytest.approx(math.sqrt(2 * 0.75**2))
    # (-0.25 - 0.75) / 2
    assert metrics["reward/return_mean"] == pytest.approx(-0.5)
    assert metrics["kl/mean"] == metrics["kl/log_ratio_mean"] == pytest.approx(0.125)
    assert metrics["kl/coef"] == 2.0


def test_whitening_comes_last():
    """Advantages are whitened after penalties, shaping, clip, KL and returns; in another order they would
    have neither this mean nor this deviation."""
    trajectories = [
        trajectory(2.0, 2),
        trajectory(8.0, 2, truncated=True),
        trajectory(5.0, 1, prompt_id=1),
        trajectory(1.0, 4, prompt_id=1),
    ]
    reward = RewardConfig(
        overlong_buffer_len=2,
        overlong_penalty_factor=2.0,
        stop_properly_penalty_coef=-2.0,
        clip_range=(-1.5, 10),
    )
    algo = {"estimator": "reinforce_baseline", "log_ratio": 0.5, "kl_coef": 1.0, "reward": reward}
    credit, metrics = assign(trajectories, **algo)
    # 4 actions of 4: 1 - 2/2 * 2 = -1; truncated: 8 becomes -2; rewards 2 -2 | 5 -1
    # means 0 | 2: 2 -2 | 3 -3, clipped to 2 -1.5 | 3 -1.5; each action pays 0.5
    returns = [[1, 1.5], [-2.5, -2], [2.5], [-3.5, -3, -2.5, -2]]
    assert [c.returns.tolist() for c in credit] == returns
    flat = [g for sample in returns for g in sample]
    center = sum(flat) / 9
    deviation = math.sqrt(sum((g - center) ** 2 for g in flat) / 9)
    assert advantages(credit) == [[(g - center) / deviation for g in sample] for sample in returns]
    assert metrics["reward/mean"] == pytest.approx(1.0)  # the mean of 2 -2 5 -1
    centered, _ = assign(trajectories, **algo, no_std_norm=True)
    assert advantages(centered) == [[g - center for g in sample] for sample in returns]


def test_group_norm_in_the_pipeline():
    """The deviation is that of penalised rewards, and the clip bounds the quotients."""
    credit, _ = assign(
        [trajectory(3.0, 1), trajectory(1.0, 1), trajectory(5.0, 2, truncated=True)],
        estimator="group_norm",
        reward=RewardConfig(stop_properly_penalty_coef=0.4, clip_range=(-0.75, 10)),
    )
    # rewards 3 1 2: mean 2, unbiased deviation 1; shaped 1 -1 0, and -1 is clipped
    assert advantages(credit) == [[1], [-0.75], [0, 0]]


def test_gae_earns_the_kl_on_every_action():
    credit, metrics = assign(
        [trajectory(4.0, 2), trajectory(1.0, 1)],
        estimator="gae",
        values=[[1.0, 2.0], [0.5]],
        log_ratio=1.0,
        kl_coef=0.5,
        gamma=0.5,
        lambd=0.5,
        no_std_norm=True,
    )
    # rewards -0.5 3.5 | 0.5; deltas -0.5 + 0.5*2 - 1 = -0.5 and 3.5 - 2 = 1.5 | 0
    # A = -0.5 + 0.25*1.5 = -0.125 and 1.5 | 0; G = A + V
    assert [c.returns.tolist() for c in credit] == [[0.875, 3.5], [0.5]]
    center = (-0.125 + 1.5) / 3
    assert advantages(credit) == [[-0.125 - center, 1.5 - center], [-center]]
    explained = 1 - np.var([-0.125, 1.5, 0]) / np.var([0.875, 3.5, 0.5])
    assert metrics["critic/explained_variance"] == pytest.approx(explained)


def test_reinforce_discounts_the_kl_of_later_actions():
    credit, _ = assign([trajectory(8.0, 3)], estimator="reinforce", log_ratio=1.0, kl_coef=2.0, gamma=0.5)
    # rewards -2 -2 6: 6, -2 + 3 = 1, -2 + 0.5 = -1.5
    assert credit[0].returns.tolist() == [-1.5, 1, 6]


@settings(deadline=None, max_examples=60)
@given(
    gaps=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=4),
    estimator=st.sampled_from(sorted(ESTIMATORS)),
    seed=st.integers(0, 100),
)
def test_feedback_between_actions_changes_nothing(gaps, estimator, seed):
    """The credit of a sample of several turns is that of the same actions in a row."""
    random = torch.Generator().manual_seed(seed)
    sizes = [len(gap) for gap in gaps]
    rewards = torch.randn(len(gaps), generator=random).tolist()
    values = [torch.randn(size, generator=random).tolist() for size in sizes]

    def credit_of(masks):
        discounts = ESTIMATORS[estimator].discounts
        credit, _ = assign(
            [trajectory(r, n, mask=mask) for r, n, mask in zip(rewards, sizes, masks, strict=True)],
            estimator=estimator,
            values=values if estimator == "gae" else None,
            log_ratio=0.3,
            kl_coef=0.2,
            gamma=0.9 if discounts else 1.0,
            lambd=0.8,
            reward=RewardConfig(overlong_buffer_len=3, stop_properly_penalty_coef=0.5),
        )
        return [(c.advantages.tolist(), c.returns.tolist()) for c in credit]

    in_turns = [[False] + [m for gap in gaps_ for m in [False] * gap + [True]] + [False] for gaps_ in gaps]
    assert credit_of(in_turns) == credit_of([[False] + [True] * size for size in sizes])


def test_groups_are_prompts_of_one_episode_of_their_real_size():
    trajectories = [
        trajectory(1.0, 1, prompt_id=5),
        trajectory(7.0, 1, prompt_id=5, epoch=1),
        trajectory(9.0, 1, prompt_id=6),
        trajectory(2.0, 1, prompt_id=5),
        trajectory(1.0, 1, prompt_id=5, epoch=1),
        trajectory(6.0, 1, prompt_id=5),
    ]
    credit, metrics = assign(trajectories, estimator="rloo")
    # 1 - (2 + 6)/2, 7 - 1, alone, 2 - (1 + 6)/2, 1 - 7, 6 - (1 + 2)/2
    assert advantages(credit) == [[-3], [6], [0], [-1.5], [-6], [4.5]]
    assert metrics["reward/without_peers"] == 1


def test_group_estimators_do_not_discount():
    credit, _ = assign([trajectory(1.0, 3), trajectory(0.0, 2)], estimator="rloo", gamma=0.5)
    assert advantages(credit) == [[1, 1, 1], [-1, -1]]


def test_whitening_is_over_all_actions():
    trajectories = [trajectory(4.0, 1), trajectory(0.0, 3)]
    credit, metrics = assign(trajectories, estimator="reinforce")
    # values 4 0 0 0: mean 1, variance (9 + 3) / 4 = 3
    assert [[3 / math.sqrt(3)], [-1 / math.sqrt(3)] * 3] == advantages(credit)
    assert [c.returns.tolist() for c in credit] == [[4], [0, 0, 0]]
    assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["advantage/std"] == pytest.approx(1)
    credit, _ = assign(trajectories, estimator="reinforce", no_std_norm=True)
    assert advantages(credit) == [[3], [-1, -1, -1]]


def test_reinforce_discounts():
    credit, _ = assign([trajectory(8.0, 3)], estimator="reinforce", gamma=0.5)
    assert credit[0].returns.tolist() == [2, 4, 8]


def test_gae_bootstraps_across_environment_feedback():
    """The value after a turn is that of the next turn's first action, not 0."""
    mask = [False, True, True, False, False, True]
    credit, _ = assign(
        [trajectory(8.0, 3, mask=mask)], estimator="gae", values=[[1.0, 2.0, 4.0]], gamma=0.5, lambd=0.5
    )
    # deltas 0.5*2 - 1 = 0, 0.5*4 - 2 = 0, 8 - 4; A = 4, 1, 0.25; G = A + V
    assert credit[0].returns.tolist() == [1.25, 3, 8]
    # mean 1.75, variance (2.25 + 0.5625 + 5.0625) / 3 = 2.625
    whitened = [d / math.sqrt(2.625) for d in (-1.5, -0.75, 2.25)]
    assert credit[0].advantages.tolist() == pytest.approx(whitened)


def test_kl_in_the_loss_is_not_in_the_reward():
    credit, metrics = assign(
        [trajectory(1.0, 2), trajectory(0.0, 2)],
        estimator="dr_grpo",
        log_ratio=1.0,
        kl_coef=0.1,
        use_loss=True,
        kl_estimator="k2",
    )
    assert advantages(credit) == [[0.5, 0.5], [-0.5, -0.5]]
    assert metrics["kl/mean"] == pytest.approx(0.5)


def test_without_reference():
    credit, metrics = assign([trajectory(1.0, 2), trajectory(0.0, 2)], estimator="dr_grpo", reference=False)
    assert advantages(credit) == [[0.5, 0.5], [-0.5, -0.5]]
    assert "kl/mean" not in metrics


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "group_norm"])
@pytest.mark.parametrize("sizes", [(0, 2), (0, 0)])
def test_a_sample_without_actions_makes_no_nan(estimator, sizes):
    trajectories = [trajectory(1.0, size) for size in sizes]
    values = [[0.5] * size for size in sizes] if estimator == "gae" else None
    credit, metrics = assign(trajectories, estimator=estimator, values=values, kl_coef=0.1)
    assert [len(c.advantages) for c in credit] == list(sizes)
    assert all(np.isfinite(c.advantages).all() for c in credit)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("kl_coef", [0.0, 1e-3])
def test_a_mean_that_is_rounding_is_zero(kl_coef):
    """Groups of three that are compared with their mean have a return of 0, which float32 misses by some
    2^-24; the KL of 0.5 on every action is no rounding."""
    rewards = [0.1, 0.2, 0.7] * 5 + [0.3, 0.3, 0.9]
    trajectories = [trajectory(r, 1, prompt_id=i // 3) for i, r in enumerate(rewards)]
    _, metrics = assign(trajectories, estimator="group_norm", kl_coef=kl_coef, log_ratio=0.5)
    assert metrics["reward/return_mean"] == pytest.approx(-0.5 * kl_coef, rel=1e-3)
    assert metrics["reward/return_mean"] == 0 or kl_coef
    assert (metrics["advantage/mean"] == 0) == (kl_coef == 0)


@pytest.mark.parametrize(("excess", "mean"), [(2**-20, 0.0), (2**-19, 3 * 2**-21)])
def test_a_sum_up_to_a_millionth_of_its_terms_is_rounding(excess, mean):
    """Float32 represents both rewards exactly. The first sum is 2^-20 of the sum of absolute values."""
    trajectories = [trajectory(1 + excess, 1), trajectory(2**-20 - 1, 1)]
    _, metrics = assign(trajectories, estimator="reinforce", reference=False)
    assert metrics["reward/return_mean"] == mean


def test_the_mismatch_of_fresh_samples_is_that_of_whole_sequences():
    """The first sequence is fresh and is off by 0.25; the second has a stale action, and is off by 2."""
    samples = [trajectory(1.0, 2), trajectory(0.0, 2)]
    batch = records.batch_of(
        samples, log_probs=[-1.25, -1.25, -3.0, -3.0], staleness=np.array([0, 0, 0, 1], np.int32)
    )
    metrics = log_prob_metrics(batch, "k1")
    assert metrics["mismatch/fresh_abs_diff_max"] == 0.25 and metrics["mismatch/abs_diff_max"] == 2


def test_equal_rewards_are_counted():
    trajectories = [
        trajectory(r, 1, prompt_id=i) for i, r in [(0, 1.0), (0, 1.0), (1, 0.0), (1, 1.0), (2, 3.0)]
    ]
    _, metrics = assign(trajectories, estimator="group_norm")
    # two of the four samples that have peers; deviations 0, 0 and twice sqrt(0.5)
    assert metrics["reward/zero_std_fraction"] == 0.5
    assert metrics["reward/group_std"] == pytest.approx(math.sqrt(0.5) / 2)


@pytest.mark.parametrize("estimator", ["reinforce", "group_norm", "rloo"])
def test_rewards_beyond_the_clip_range_are_counted_and_told(estimator):
    """Group estimators compare rewards within the group first. An episode in two parts counts once."""
    rewards = (1e6, 2e6, 4e6, 5e6) if estimator != "group_norm" else (1.0, 1.0, 1.0, 5.0)
    trajectories = [trajectory(r, 2, sample_index=i) for i, r in enumerate(rewards)]
    trajectories.insert(1, trajectory(rewards[0], 1, sample_index=0, part=1))
    bounds = (-10.0, 10.0) if estimator != "group_norm" else (-10.0, 1.4)
    credit, metrics = assign(trajectories, estimator=estimator, reward=RewardConfig(clip_range=bounds))
    beyond = {"group_norm": 0.25}.get(estimator, 1.0)  # (5 - 2) / 2 = 1.5 is the only one
    assert metrics["reward/clipped_fraction"] == beyond
    shaped = {"group_norm": (-0.5, 1.5), "rloo": (-2e6 * 4 / 3, 2e6 * 4 / 3)}
    expected = shaped.get(estimator, (1e6, 5e6))
    assert (metrics["reward/shaped_min"], metrics["reward/shaped_max"]) == pytest.approx(expected)
    told = Health().check(metrics)
    assert any("--reward.clip_range" in text and f"{expected[1]:.6g}" in text for text in told)
    flat = [a for c in credit for a in c.advantages.tolist()]
    assert metrics["advantage/abs_mean"] == pytest.approx(math.fsum(map(abs, flat)) / len(flat))


def test_rewards_that_are_all_clipped_to_one_number_are_told_as_a_step_without_advantages():
    trajectories = [trajectory(1e6 * (1 + i), 2, sample_index=i) for i in range(4)]
    _, metrics = assign(trajectories, estimator="reinforce", reference=False)
    assert metrics["advantage/abs_mean"] == 0 and metrics["reward/clipped_fraction"] == 1
    told = [text.partition(" (")[0] for text in Health().check(metrics)]
    assert told == ["reward/clipped_fraction > 0.1 for 1 step", "advantage/abs_mean = 0 for 1 step"]


def test_parts_of_an_episode_count_once_in_their_group():
    """The rewards count as 4, 1 and 1, not 4, 4, 1 and 1. Both parts earn what their episode does."""
    trajectories = [
        trajectory(4.0, 2, sample_index=0),
        trajectory(4.0, 1, sample_index=0, part=1),
        trajectory(1.0, 1, sample_index=1),
        trajectory(1.0, 1, sample_index=2),
    ]
    credit, metrics = assign(trajectories, estimator="rloo")
    # 4 - (1 + 1)/2, and twice 1 - (4 + 1)/2
    assert advantages(credit) == [[3, 3], [3], [-1.5], [-1.5]]
    assert metrics["reward/mean"] == 2
    assert metrics["reward/group_std"] == pytest.approx(math.sqrt(3))


def test_a_sample_of_two_parts_has_no_peers():
    credit, metrics = assign(
        [trajectory(4.0, 2, sample_index=0), trajectory(4.0, 1, sample_index=0, part=1)], estimator="rloo"
    )
    assert advantages(credit) == [[0, 0], [0]]
    assert metrics["reward/without_peers"] == 1


def test_an_episode_is_as_long_as_all_its_parts():
    """An episode of 3 + 1 actions earns 6 - 2/2 * 4 = 2, and half of that if its last part is truncated; one
    of 3 actions earns 5 - 1/2 * 4."""
    trajectories = [
        trajectory(6.0, 3, sample_index=0),
        trajectory(6.0, 1, sample_index=0, part=1, truncated=True),
        trajectory(5.0, 3, sample_index=1),
    ]
    reward = RewardConfig(overlong_buffer_len=2, overlong_penalty_factor=4.0, stop_properly_penalty_coef=0.5)
    credit, metrics = assign(trajectories, estimator="rloo", reward=reward)
    assert metrics["reward/mean"] == 2  # the mean of 1 and 3
    assert advantages(credit) == [[-2, -2, -2], [-2], [2, 2, 2]]


@pytest.mark.parametrize(("gamma", "returns"), [(1.0, [-1.0, -2.0]), (0.0, [1.0, -2.0])])
def test_a_teacher_rewards_every_action(gamma, returns):
    """The reward is 2 (log p_teacher - log p): 2 (-0.5 + 1) = 1 and 2 (-2 + 1) = -2; without discount the
    first action also earns what the second does."""
    one = trajectory(0.0, 2)
    columns = {"log_probs": -1.0, "teacher_log_probs": [-0.5, -2.0]}
    algo = AlgoConfig(advantage=AdvantageConfig(estimator="reinforce", gamma=gamma))
    batch, metrics = compute_advantages(
        records.batch_of([one], **columns),
        [one],
        estimator=algo.build_estimator(),
        algo=algo,
        reward=RewardConfig(),
        kl_coef=0.0,
        max_new_tokens=4,
        teacher_coef=2.0,
    )
    assert batch.returns.tolist() == returns
    assert metrics["teacher/kl_mean"] == 0.25  # the mean of -0.5 and 1


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rewards_of_turns_are_earned_where_they_were_earned(estimator: str) -> None:
    """With estimators that look ahead, an action earns what its own and later turns did; the other estimators
    compare whole episodes. Turns of 2, 1 and 2 actions earn 1, -2 and 4."""
    turns = trajectory(
        3.0,
        5,
        mask=[False, True, True, False, True, False, True, True],
        turn_starts=[1, 4, 6],
        turn_rewards=[1, -2, 4],
    )
    plain, _ = assign(
        [trajectory(3.0, 5, mask=turns.action_mask.tolist())], estimator=estimator, **known(estimator)
    )
    found, _ = assign([turns], estimator=estimator, **known(estimator))
    if ESTIMATORS[estimator].discounts:
        wanted = [3, 3, 2, 4, 4]
        assert found[0].returns.tolist() == pytest.approx(wanted, abs=1e-5)
        assert plain[0].returns.tolist() == pytest.approx([3] * 5, abs=1e-5)
    else:
        assert found[0].returns.tolist() == plain[0].returns.tolist()


def test_the_rest_of_a_reward_is_earned_by_the_last_action():
    """The first turn earns 1 of 5, and the last action the rest. A sample without rewards of turns earns its
    reward at its last action."""
    mask = [False, True, True, False, True]
    samples = [
        trajectory(5.0, 3, mask=mask, turn_starts=[1, 4], turn_rewards=[1, 2]),
        trajectory(2.0, 3, mask=mask, turn_starts=[1, 4]),
    ]
    credit, metrics = assign(samples, estimator="reinforce")
    assert [c.returns.tolist() for c in credit] == [[5, 5, 4], [2, 2, 2]]
    assert metrics["reward/return_mean"] == 3.5
    mask = [False, True, False, True]  # an episode in two sequences, whose turns earn 1, 2, 4 and the rest 3
    parts = [
        trajectory(10.0, 2, mask=mask, sample_index=0, turn_starts=[1, 3], turn_rewards=[1, 2]),
        trajectory(10.0, 1, sample_index=0, part=1, turn_starts=[1], turn_rewards=[4]),
    ]
    credit, _ = assign(parts, estimator="reinforce")
    assert [c.returns.tolist() for c in credit] == [[10, 9], [7]]


def known(estimator: str) -> dict:
    return {"values": [[0.0] * 5], "lambd": 1.0} if ESTIMATORS[estimator].needs_critic else {}
