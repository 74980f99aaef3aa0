"""Metrics of RL steps and evaluations, checked by a second computation in the first steps
(`--train.verify_steps`): those of the run's own samples, and of synthetic samples that have what a first step
lacks."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from openrlhf.api import Metrics, Outcome, Prompt, Trajectory, evaluation_metrics
from openrlhf.api import runs_of_version as runs
from openrlhf.tools.reference.metrics import plain_evaluation_metrics
from openrlhf.tools.selftest.invariants import broken

RELATIVE = 1e-3
"""Largest relative difference between two computations of a metric, at least one of which is in float32."""


def check_metrics(found: Metrics, expected: Metrics, step: int, samples: str = "the step") -> None:
    """Checks the metrics that `expected` has. `samples`: what they measure."""
    for name, value in expected.items():
        measured = found.get(name, math.nan)
        if not math.isclose(measured, value, rel_tol=RELATIVE, abs_tol=RELATIVE):
            causes = "It counts other samples or actions, or has another formula than its documentation."
            raise broken(step, f"{name} of {samples}", f"{measured:.6g}", f"{value:.6g}", causes)


def check_evaluation(metrics: Metrics, trajectories: Sequence[Trajectory], step: int) -> None:
    """Checks the metrics of an evaluation, and those of synthetic samples."""
    check_metrics(metrics, plain_evaluation_metrics(trajectories), step, "the evaluation")
    synthetic = list(synthetic_evaluation())
    check_metrics(
        evaluation_metrics(synthetic), plain_evaluation_metrics(synthetic), step, "synthetic samples"
    )


def synthetic_evaluation() -> Iterable[Trajectory]:
    """Yields samples of prompts of two sources, of which some failed and some have two sequences."""
    scores = {
        ("math", 0): (1.0, 0.0, 0.0, 1.0),
        ("code", 1): (0.25, None, 0.5, -1.0),
        ("math", 2): (None, None, 0.0, None),
        ("code", 3): (2.0, 0.5, 0.75, 0.0),
        ("math", 4): (None, None, None, None),
    }
    for (source, prompt_id), of_prompt in scores.items():
        for i, score in enumerate(of_prompt):
            for part in range(2 if i == 0 else 1):
                yield Trajectory(
                    prompt=Prompt(prompt_id=prompt_id, text="", source=source),
                    sample_index=i,
                    part=part,
                    outcome=Outcome.OK if score is not None else Outcome.REWARD_ERROR,
                    reward=score,
                    score=score,
                    token_ids=np.arange(3, dtype=np.int32),
                    action_mask=np.arange(3) > 0,
                    rollout_log_probs=np.full(2, -1, np.float32),
                    weight_versions=runs([0, 0]),
                )
