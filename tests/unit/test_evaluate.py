from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.trainer.evaluate import evaluation_metrics, expected_best
from openrlhf.types import Outcome, Prompt, Trajectory


def trajectory(prompt_id, sample_index, score, source="math", length=2, truncated=False) -> Trajectory:
    """A failed one where the score is None."""
    return Trajectory(
        prompt=Prompt(prompt_id=prompt_id, text="", source=source),
        sample_index=sample_index,
        token_ids=[1] * (1 + length),
        action_mask=[False] + [True] * length,
        rollout_log_probs=[0.0] * length,
        weight_versions=[0] * length,
        reward=score,
        score=score,
        truncated=truncated,
        outcome=Outcome.OK if score is not None else Outcome.REWARD_ERROR,
    )


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=7), st.data())
def test_expected_best_is_the_mean_over_all_choices(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    choices = [max(choice) for choice in combinations(scores, k)]
    assert expected_best(scores, k) == pytest.approx(sum(choices) / len(choices), abs=1e-9)


def test_expected_best_of_right_and_wrong_is_pass_at_k():
    """1 - C(n - c, k) / C(n, k), https://arxiv.org/abs/2107.03374: here 1 - C(3, 2) / C(5, 2) = 0.7"""
    assert expected_best([1, 0, 0, 1, 0], 2) == pytest.approx(0.7)
    assert expected_best([1, 0, 0, 1, 0], 5) == 1
    assert expected_best([0.0, 0.0], 2) == 0


def test_by_hand():
    metrics = evaluation_metrics(
        [
            *(trajectory(0, i, s) for i, s in enumerate([1.0, 0.0])),
            *(trajectory(1, i, s, length=4) for i, s in enumerate([0.0, 0.0])),
            *(trajectory(2, i, s, source="code", truncated=True) for i, s in enumerate([1.0, 1.0])),
        ]
    )
    assert metrics == {
        "eval/failed_ratio": 0,
        "eval/math_pass1": 0.25,
        "eval/math_pass2": 0.5,
        "eval/math_response_length_mean": 3,
        "eval/math_truncated_rate": 0,
        "eval/math_num_samples": 4,
        "eval/code_pass1": 1,
        "eval/code_pass2": 1,
        "eval/code_response_length_mean": 2,
        "eval/code_truncated_rate": 1,
        "eval/code_num_samples": 2,
    }


def test_prompts_weigh_the_same_however_many_samples_failed():
    samples = [
        *(trajectory(0, i, s) for i, s in enumerate([1.0, None, None, None])),
        *(trajectory(1, i, s) for i, s in enumerate([0.0, 0.0, 0.0, 0.0])),
        *(trajectory(2, i, None) for i in range(4)),
    ]
    metrics = evaluation_metrics(samples)
    assert metrics["eval/math_pass1"] == 0.5
    assert metrics["eval/math_pass4"] == 0.5  # of the one that is left of prompt 0
    assert metrics["eval/failed_ratio"] == 7 / 12
    assert metrics["eval/math_num_samples"] == 5


def test_a_source_of_which_everything_failed_has_no_figures():
    metrics = evaluation_metrics([trajectory(0, 0, 1.0), trajectory(1, 0, None, source="code")])
    assert not any(name.startswith("eval/code") for name in metrics)
    assert metrics["eval/failed_ratio"] == 0.5


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_order_does_not_matter(order):
    samples = [trajectory(i // 2, i % 2, s) for i, s in enumerate([1.0, 0.0, 0.5, 0.25])]
    assert evaluation_metrics([samples[i] for i in order]) == evaluation_metrics(samples)
