import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import records
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.observability.hooks.base import Step
from openrlhf.observability.rollout_metrics import BLOCK, RolloutMetrics, rollout_metrics, source_metrics
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.tasks.word_problem import make_problems, worked_problem
from openrlhf.tools.doctor.symptoms import RULES
from openrlhf.types import Outcome, Trajectory


def trajectory(
    reward: float | None = 1.0, actions: tuple[int, ...] = (7, 8), *, versions: Sequence[int] = (), **changes
) -> Trajectory:
    """Returns a trajectory, failed if the reward is None. The prompt is one token, the version 3."""
    count = sum(changes.get("action_mask", [True] * len(actions)))
    outcome = Outcome.OK if reward is not None else Outcome.ENV_ERROR
    return records.trajectory(
        reward, actions, **({"outcome": outcome, "versions": versions or [3] * count} | changes)
    )


def test_each_of_several_sources_has_metrics_of_its_own():
    samples = [
        trajectory(0.0, (5, 6), source="math"),
        trajectory(1.0, (5, 6, 7, 8), source="math", truncated=True),
        trajectory(4.0, (5,), source="chat", prompt_id=1),
        trajectory(None, source="chat", prompt_id=1),
        trajectory(None, source="code", prompt_id=2),
    ]
    assert source_metrics(samples, version=3) == {
        "rollout/math_num_samples": 2,
        "rollout/math_failed_ratio": 0,
        "rollout/math_reward_mean": 0.5,
        "rollout/math_score_mean": 0.5,
        "rollout/math_response_length_mean": 3,
        "rollout/math_truncated_rate": 0.5,
        "rollout/chat_num_samples": 2,
        "rollout/chat_failed_ratio": 0.5,
        "rollout/chat_reward_mean": 4,
        "rollout/chat_score_mean": 4,
        "rollout/chat_response_length_mean": 1,
        "rollout/chat_truncated_rate": 0,
        "rollout/code_num_samples": 1,
        "rollout/code_failed_ratio": 1,
    }
    assert source_metrics(samples[:2], version=3) == {}


def test_extra_logs_replace_no_metric_of_the_collection():
    samples = [trajectory(1.0, extra_logs={"num_prompts": 9.0, "own": 2.0})]
    step = Step(number=1, version=3, samples=samples, metrics={"rollout/num_prompts": 4.0})
    RolloutMetrics().scoring(step)
    assert step.metrics["rollout/num_prompts"] == 4
    assert step.metrics["rollout/own"] == 2


def test_by_hand():
    """The rollout has two samples of one prompt, one of another, and one that failed."""
    metrics = rollout_metrics(
        [
            trajectory(0.0, (5, 6), versions=[4, 4], extra_logs={"format": 1.0}),
            trajectory(1.0, (5, 6, 7, 8), versions=[4, 4, 5, 5], truncated=True),
            trajectory(2.0, (5, 6, 7), prompt_id=1, versions=[2, 5, 5], extra_logs={"format": 0.5}),
            trajectory(None, (5, 6), versions=[0, 0], truncated=True, extra_logs={"format": 9.0}),
        ],
        version=5,
    )
    assert metrics == {
        "rollout/num_samples": 4,
        "rollout/failed_ratio": 0.25,
        "rollout/env_error_count": 1,
        "rollout/reward_mean": 1,
        "rollout/reward_std": pytest.approx(math.sqrt(2 / 3)),
        "rollout/reward_max": 2,
        "rollout/score_mean": 1,
        "rollout/response_length_mean": 3,
        "rollout/response_length_std": pytest.approx(math.sqrt(2 / 3)),
        "rollout/response_length_max": 4,
        "rollout/total_length_mean": 4,
        "rollout/truncated_rate": pytest.approx(1 / 3),
        "rollout/staleness_mean": pytest.approx((4 * 1 + 2 * 0 + 1 * 3 + 2 * 0) / 9),
        "rollout/staleness_max": 3,
        "rollout/duplicate_ratio": 0,
        "rollout/repetition_ratio": 0,
        # lengths 2, 4, 3 and rewards 0, 1, 2: covariance 1/3, variances 2/3 and 2/3
        "rollout/length_reward_correlation": pytest.approx(0.5),
        "rollout/format": 0.75,
    }


def test_what_sampling_kept():
    """Among actions with a kept set the sets have 3, 1 and 2 tokens, with masses 0, 0 and 0.25 left out."""
    cut = trajectory(actions=(5, 6), kept=records.kept_sets([5, 7, 8], [6]))
    mixed = trajectory(actions=(5, 6), kept=records.kept_sets([], [6, 7], shares=[1, 0.75]))
    metrics = rollout_metrics([cut, mixed, trajectory()], version=0)
    assert metrics["rollout/kept_set_size_mean"] == 2
    assert metrics["rollout/kept_set_rest_mean"] == pytest.approx(0.25 / 3)
    assert not any("kept_set" in name for name in rollout_metrics([trajectory()], version=0))


def test_when_every_sample_failed_only_that_is_told():
    assert rollout_metrics([trajectory(None), trajectory(None, outcome=Outcome.ABORTED)], version=1) == {
        "rollout/num_samples": 2,
        "rollout/failed_ratio": 1,
        "rollout/env_error_count": 1,
        "rollout/aborted_count": 1,
    }


@pytest.mark.parametrize("change", [{"reward": 2.0}, {"actions": (5,)}, {}])
def test_where_nothing_varies_there_is_no_correlation(change):
    metrics = rollout_metrics([trajectory(0.1), trajectory(0.1), trajectory(**{"reward": 0.1} | change)], 3)
    assert "rollout/length_reward_correlation" not in metrics


def test_samples_without_an_action_have_no_staleness():
    metrics = rollout_metrics([trajectory(1.0, ()), trajectory(0.0, ())], version=3)
    assert not any("staleness" in name for name in metrics)
    assert metrics["rollout/response_length_mean"] == 0 and metrics["rollout/duplicate_ratio"] == 1


def test_only_actions_count_as_repetition():
    """The environment's answer between two actions is not the policy's."""
    mask = [False, True, False, True]
    one, other = (trajectory(token_ids=[1, 7, feedback, 8], action_mask=mask) for feedback in (2, 3))
    assert rollout_metrics([one, other], 3)["rollout/duplicate_ratio"] == 1
    assert rollout_metrics([one, trajectory(actions=(7, 2, 8))], 3)["rollout/duplicate_ratio"] == 0


def test_only_samples_of_the_same_prompt_and_episode_repeat_each_other():
    apart = [trajectory(), trajectory(prompt_id=1), trajectory(epoch=1), trajectory(None)]
    assert "rollout/duplicate_ratio" not in rollout_metrics(apart, 3)
    # one more prompt in two of the groups: it repeats in one and differs in the other
    more = [trajectory(prompt_id=1), trajectory(epoch=1, actions=(9,))]
    assert rollout_metrics(apart + more, 3)["rollout/duplicate_ratio"] == 0.5
    parts = [trajectory(actions=(a,), sample_index=a, part=part) for a in (2, 3) for part in range(3)]
    assert rollout_metrics(parts, 3)["rollout/duplicate_ratio"] == 0


def test_what_an_answer_said_before_is_repetition():
    """The fifth run of four repeats in 1234 2341 3412 4123 1234 2345, all but one in four times 7777; 123 has
    no run of four."""
    answers = [(1, 2, 3, 4, 1, 2, 3, 4, 5), (7,) * 7, (1, 2, 3), (1, 2, 3, 4)]
    metrics = rollout_metrics([trajectory(1.0, actions) for actions in answers], 3)
    assert metrics["rollout/repetition_ratio"] == pytest.approx((1 / 6 + 3 / 4 + 0) / 3)
    assert "rollout/repetition_ratio" not in rollout_metrics([trajectory(1.0, (1, 1, 1))], 3)


def test_the_repetition_of_many_answers_is_the_mean_of_that_of_each():
    rng = random.Random(0)
    answers = [tuple(rng.choices(range(3), k=rng.randrange(1, 30))) for _ in range(3 * BLOCK + 1)]
    runs = [[actions[i : i + 4] for i in range(len(actions) - 3)] for actions in answers]
    expected = statistics.fmean(1 - len(set(own)) / len(own) for own in runs if own)
    metrics = rollout_metrics([trajectory(1.0, actions) for actions in answers], 3)
    assert metrics["rollout/repetition_ratio"] == pytest.approx(expected, rel=1e-12)


def test_the_limit_of_repetition_is_between_good_and_degenerate_answers():
    (limit,) = (rule.limit for rule in RULES if rule.metric == "rollout/repetition_ratio")
    tokenizer = tiny_tokenizer()

    def ratio(texts):
        answers = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        samples = [trajectory(1.0, tuple(actions)) for actions in answers]
        return rollout_metrics(samples, 3)["rollout/repetition_ratio"]

    worked = [worked_problem(problem) for problem in make_problems(100, seed=3)]
    assert ratio(worked) < 0.02
    assert ratio([(Path(__file__).parents[3] / "README.md").read_text()[:500]]) < limit / 2
    assert ratio(["dog" + " dog" * 12]) > limit
    assert ratio([text + " so" * 100 for text in worked]) > limit  # the answers are good at first, then loop


def test_a_name_of_the_run_is_not_overwritten_by_an_extra_log():
    metrics = rollout_metrics([trajectory(extra_logs={"failed_ratio": 0.7, "reward_mean": 0.7})], 3)
    assert metrics["rollout/failed_ratio"] == 0 and metrics["rollout/reward_mean"] == 1


GROUPS = st.lists(
    st.lists(
        st.tuples(st.none() | st.floats(-3, 3), st.lists(st.integers(0, 1), max_size=3).map(tuple)),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=4,
)


@given(GROUPS, st.randoms())
def test_order_does_not_matter_and_everything_is_finite(groups, random):
    samples = [
        trajectory(reward, actions, prompt_id=i, versions=[i] * len(actions))
        for i, group in enumerate(groups)
        for reward, actions in group
    ]
    metrics = rollout_metrics(samples, version=4)
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0 <= metrics.get("rollout/duplicate_ratio", 0) <= 1
    assert abs(metrics.get("rollout/length_reward_correlation", 0)) <= 1 + 1e-9
    shuffled = random.sample(samples, len(samples))
    assert rollout_metrics(shuffled, version=4) == pytest.approx(metrics)


def test_rewards_of_tiny_differences_have_no_correlation():
    metrics = rollout_metrics([trajectory(0.0, (1,)), trajectory(1e-200, (1, 2))], version=3)
    assert "rollout/length_reward_correlation" not in metrics
