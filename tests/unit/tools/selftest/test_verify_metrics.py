"""Metrics of steps and evaluations, compared with those of plain formulas."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from records import trajectory
from refusals import broken

from openrlhf.algorithms import mismatch
from openrlhf.config.ppo import AdvantageConfig, AlgoConfig, KLConfig, RewardConfig
from openrlhf.observability import rollout_metrics as sample_metrics
from openrlhf.observability.rollout_metrics import rollout_metrics
from openrlhf.tools.reference.metrics import (
    plain_evaluation_metrics,
    plain_log_prob_metrics,
    plain_rollout_metrics,
)
from openrlhf.tools.selftest.verify_rl import (
    check_evaluation,
    check_metrics,
    synthetic_evaluation,
    synthetic_samples,
)
from openrlhf.training import advantages, evaluate
from openrlhf.training.advantages import compute_advantages
from openrlhf.training.evaluate import evaluation_metrics
from openrlhf.types import Batch, Metrics, Trajectory


def samples() -> list[Trajectory]:
    """Returns samples of two prompts: equal ones, a failed one, and one in two sequences."""
    return [
        trajectory(1.0, [2, 3], prompt_id=0, sample_index=0, versions=[4, 3]),
        trajectory(0.5, [2, 3], prompt_id=0, sample_index=1, truncated=True),
        trajectory(None, [5], prompt_id=0, sample_index=2),
        trajectory(-1.0, [2, 3], prompt_id=1, sample_index=0, versions=[4, 4]),
        trajectory(-1.0, [6, 7, 8], prompt_id=1, sample_index=0, part=1, versions=[3, 2, 2]),
        trajectory(0.0, [9], prompt_id=1, sample_index=1, versions=[4]),
    ]


def test_metrics_of_samples_by_hand() -> None:
    metrics = plain_rollout_metrics(samples(), version=4)
    assert metrics == pytest.approx(
        {
            "rollout/reward_mean": 0.125,
            "rollout/reward_std": 0.73951,
            "rollout/score_mean": 0.125,
            "rollout/response_length_mean": 2.0,
            "rollout/truncated_rate": 0.2,
            "rollout/staleness_mean": (1 + 8 + 5) / 10,
            "rollout/staleness_max": 4.0,
            "rollout/duplicate_ratio": 1 / 2,
        },
        rel=1e-4,
    )
    check_metrics(rollout_metrics(samples(), 4), metrics, 1)
    assert plain_rollout_metrics(samples()[2:3], 4) == {}


def credited(estimator: str = "k3") -> tuple[Metrics, Batch]:
    columns = dict.fromkeys(("log_probs", "ref_log_probs", "values"), np.zeros(2, np.float32))
    batch, found = synthetic_samples(replace(Batch.of([trajectory(actions=[2, 3])]), **columns), 16)
    algo = AlgoConfig(advantage=AdvantageConfig(estimator="gae"), kl=KLConfig(estimator=estimator))
    batch, metrics = compute_advantages(
        batch,
        found,
        estimator=algo.build_estimator(),
        algo=algo,
        reward=RewardConfig(),
        kl_coef=0.1,
        max_new_tokens=16,
    )
    return metrics | rollout_metrics(found, 0), batch


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_metrics_of_log_probs_and_values(estimator: str) -> None:
    metrics, batch = credited(estimator)
    expected = plain_log_prob_metrics(batch, estimator)
    assert len(expected) == 6
    check_metrics(metrics, expected, 1)
    assert len(plain_log_prob_metrics(replace(batch, values=None, ref_log_probs=None), estimator)) == 3
    assert plain_log_prob_metrics(replace(batch, log_probs=None, values=None), estimator) == {}


def test_returns_that_differ_by_the_rounding_of_values_have_no_explained_variance() -> None:
    """Rewards are 0 and values near 1, so that returns are what rounding leaves of sums of values."""
    _, batch = credited()
    values = np.linspace(0.5, 1.5, len(batch.values), dtype=np.float32)
    returns = np.where(np.arange(len(values)) % 2, 6e-8, 0).astype(np.float32)
    metrics = plain_log_prob_metrics(replace(batch, values=values, returns=returns), "k3")
    assert "critic/explained_variance" not in metrics


WRONG: dict[str, tuple[Any, str, Callable]] = {
    "mismatch/kl": (
        mismatch,
        "_mismatch",
        lambda log_ratio, distance, right=mismatch._mismatch: right(-log_ratio, distance),
    ),
    "kl/mean": (advantages, "approx_kl", lambda policy, reference, estimator: policy - reference),
    "critic/explained_variance": (
        advantages,
        "explained_variance",
        lambda values, returns: float(1 - ((returns - values) ** 2).mean() / returns.var()),
    ),
    "rollout/duplicate_ratio": (
        sample_metrics,
        "_duplicates",
        lambda finished, actions: {"rollout/duplicate_ratio": 0.0},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_metrics_of_synthetic_samples_are_found(name: str) -> None:
    module, function, wrong = WRONG[name]
    with patch.object(module, function, wrong):
        metrics, batch = credited()
        expected = plain_log_prob_metrics(batch, "k3") | {"rollout/duplicate_ratio": 4 / 8}
    with broken() as refusal:
        check_metrics(metrics, expected, 3, "synthetic samples")
    assert refusal.value.text.startswith(f"step 3: {name} of synthetic samples is ")


def test_scores_of_synthetic_samples_by_hand() -> None:
    assert plain_evaluation_metrics(list(synthetic_evaluation())) == pytest.approx(
        {
            "eval/failed_ratio": 8 / 20,
            "eval/math_score_mean": 0.25,
            "eval/math_best_of2": (5 / 6 + 0) / 2,
            "eval/math_best_of4": 0.5,
            "eval/code_score_mean": (-0.25 / 3 + 3.25 / 4) / 2,
            "eval/code_best_of2": ((0.5 + 0.25 + 0.5) / 3 + (2 + 2 + 2 + 0.75 + 0.5 + 0.75) / 6) / 2,
            "eval/code_best_of4": (0.5 + 2) / 2,
        }
    )


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("expected_best", lambda scores, k: scores[0]),
        ("list_ks", lambda n: [1]),
        ("fmean", lambda values: next(iter(values))),
    ],
)
def test_wrong_scores_of_an_evaluation_are_found(function: str, wrong: Callable) -> None:
    evaluated = [trajectory(float(i == 1), prompt_id=p, sample_index=i) for p in range(2) for i in range(2)]
    check_evaluation(evaluation_metrics(evaluated), evaluated, 0)
    metrics = evaluation_metrics(evaluated)
    with patch.object(evaluate, function, wrong), broken() as refusal:
        check_evaluation(metrics, evaluated, 0)
    assert "of synthetic samples" in refusal.value.text
