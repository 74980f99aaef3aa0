import math
from dataclasses import replace
from itertools import combinations

import pytest
import records
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.training.evaluate import as_scores, evaluation_metrics, expected_best, list_ks
from openrlhf.types import Prompt, Trajectory


def trajectory(prompt_id, sample_index, score, source="math", length=2, truncated=False) -> Trajectory:
    """Returns a trajectory, failed if the score is None."""
    prompt = Prompt(prompt_id=prompt_id, text="", source=source)
    return records.trajectory(
        score, [1] * length, prompt=prompt, sample_index=sample_index, truncated=truncated
    )


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=7), st.data())
def test_expected_best_is_the_mean_over_all_choices(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    choices = [max(choice) for choice in combinations(scores, k)]
    assert expected_best(scores, k) == pytest.approx(sum(choices) / len(choices), abs=1e-9)


def test_expected_best_of_right_and_wrong_is_pass_at_k():
    """pass@k is 1 - C(n - c, k) / C(n, k), https://arxiv.org/abs/2107.03374: here 1 - C(3, 2) / C(5, 2) =
    0.7"""
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
        "eval/num_samples": 6,
        "eval/response_length_mean": pytest.approx(16 / 6),
        "eval/truncated_rate": pytest.approx(1 / 3),
        "eval/math_pass1": 0.25,
        "eval/math_pass2": 0.5,
        "eval/math_score_mean": 0.25,
        "eval/math_best_of2": 0.5,
        "eval/math_response_length_mean": 3,
        "eval/math_truncated_rate": 0,
        "eval/math_num_samples": 4,
        "eval/code_pass1": 1,
        "eval/code_pass2": 1,
        "eval/code_score_mean": 1,
        "eval/code_best_of2": 1,
        "eval/code_response_length_mean": 2,
        "eval/code_truncated_rate": 1,
        "eval/code_num_samples": 2,
    }


def test_a_sample_of_two_parts_counts_once_and_has_the_length_of_both():
    first, last = trajectory(0, 0, 1.0, length=2), trajectory(0, 0, 1.0, length=4, truncated=True)
    metrics = evaluation_metrics([first, replace(last, part=1)])
    assert metrics["eval/num_samples"] == metrics["eval/math_pass1"] == 1
    assert (metrics["eval/response_length_mean"], metrics["eval/truncated_rate"]) == (3, 0.5)


def test_a_sample_of_two_parts_has_one_score_and_fails_once():
    right, wrong, failed = (trajectory(0, i, score) for i, score in enumerate([1.0, 0.0, None]))
    metrics = evaluation_metrics([right, replace(right, part=1), wrong, failed])
    assert metrics["eval/math_pass1"] == metrics["eval/math_score_mean"] == 0.5
    assert metrics["eval/failed_ratio"] == pytest.approx(1 / 3)


def test_a_figure_for_every_power_of_two_and_for_all_samples():
    """2 of 6 samples are right: 1 - C(4, k) / C(6, k)."""
    samples = [trajectory(0, i, s) for i, s in enumerate([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])]
    passes = {n: v for n, v in evaluation_metrics(samples).items() if "pass" in n}
    assert passes == pytest.approx(
        {"eval/math_pass1": 1 / 3, "eval/math_pass2": 0.6, "eval/math_pass4": 14 / 15, "eval/math_pass6": 1}
    )


@pytest.mark.parametrize(
    ("n", "ks"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (9, [1, 2, 4, 8, 9])]
)
def test_which_k_are_reported(n, ks):
    assert list_ks(n) == ks


def test_thousands_of_samples_do_not_overflow():
    assert expected_best([0.0] * 2000 + [1.0] * 2000, 2000) == pytest.approx(1)
    assert expected_best([0.0] * 3999 + [1.0], 1000) == pytest.approx(0.25)


def test_prompts_of_the_same_text_in_two_sources_are_told_apart():
    """All prompts of this file have the same text, and each its own id."""
    samples = [trajectory(0, 0, 1.0), trajectory(0, 1, 1.0), trajectory(1, 0, 0.0), trajectory(1, 1, 0.0)]
    samples += [trajectory(2, 0, 0.5, source="code"), trajectory(2, 1, 0.0, source="code")]
    metrics = evaluation_metrics(samples)
    assert metrics["eval/math_pass2"] == 0.5
    assert (metrics["eval/code_score_mean"], metrics["eval/code_best_of2"]) == (0.25, 0.5)


def test_only_verdicts_pass():
    """Outputs of a reward model have a mean and a best, and nothing that they pass."""
    metrics = evaluation_metrics([trajectory(0, i, s) for i, s in enumerate([30.5, -2.0, 0.0, 1.0])])
    assert not [name for name in metrics if "pass" in name]
    assert metrics["eval/math_score_mean"] == pytest.approx(29.5 / 4)
    assert metrics["eval/math_best_of2"] == pytest.approx((3 * 30.5 + 2 * 1 + 0) / 6)
    assert metrics["eval/math_best_of4"] == 30.5


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("eval/math_pass1", "eval/math_score_mean"),
        ("math_pass16", "math_best_of16"),
        ("math_pass11", "math_best_of11"),
        ("math_pass1_score_mean", "math_pass1_score_mean"),
        ("eval/truncated_rate", "eval/truncated_rate"),
    ],
)
def test_names_of_pass_at_k_name_scores_too(key, name):
    assert as_scores(key) == name


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.lists(st.none() | st.floats(-5, 5), min_size=4, max_size=4)),
        min_size=1,
        max_size=5,
    )
)
def test_more_samples_are_never_worse_whatever_fails(prompts):
    samples = [
        trajectory(prompt_id, i, score, source)
        for prompt_id, (source, scores) in enumerate(prompts)
        for i, score in enumerate(scores)
    ]
    metrics = evaluation_metrics(samples)
    for source in {p.source for p in (t.prompt for t in samples if t.ok)}:
        passes = [metrics[f"eval/{source}_{name}"] for name in ("score_mean", "best_of2", "best_of4")]
        assert passes == pytest.approx(sorted(passes))
    assert all(math.isfinite(value) for value in metrics.values())


def test_when_everything_failed_only_that_is_told():
    metrics = evaluation_metrics([trajectory(0, i, None) for i in range(3)])
    assert metrics == {"eval/failed_ratio": 1, "eval/num_samples": 0}


def test_prompts_weigh_the_same_however_many_samples_failed():
    samples = [
        *(trajectory(0, i, s) for i, s in enumerate([1.0, None, None, None])),
        *(trajectory(1, i, s) for i, s in enumerate([0.0, 0.0, 0.0, 0.0])),
        *(trajectory(2, i, None) for i in range(4)),
    ]
    metrics = evaluation_metrics(samples)
    assert metrics["eval/math_pass1"] == 0.5
    assert metrics["eval/math_pass4"] == 0.5  # computed from the samples of prompt 0 that are left
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
