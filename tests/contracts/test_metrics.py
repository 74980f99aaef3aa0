"""docs/metrics.md documents every metric of reinforcement learning, and no other."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from records import trajectory

from openrlhf.backends.peak_memory import memory_metrics
from openrlhf.config.ppo import AdvantageConfig, AlgoConfig, RewardConfig
from openrlhf.observability.rollout_metrics import OF_SOURCES, rollout_metrics
from openrlhf.training.advantages import compute_advantages
from openrlhf.training.collect import FilterResult
from openrlhf.training.evaluate import evaluation_metrics
from openrlhf.training.worker import PHASES
from openrlhf.types import Batch, Outcome, Trajectory, runs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text().partition("## Health warnings")[0]
SECTIONS = "rollout|reward|advantage|kl|teacher|mismatch|policy|critic|eval|memory"
DOCUMENTED = set(re.findall(rf"`((?:{SECTIONS})/[\w{{}}]+|grad_norm|lr|num_tokens|skipped)`", PAGE))
PATTERNS = [re.compile(re.sub(r"{\w+}", r"\\w+", name)) for name in DOCUMENTED if name != "rollout/{name}"]
ENGINE = {"grad_norm", "lr", "num_tokens", "skipped"}
"""Metrics that TrainedRank.train_step adds; the critic's begin with `critic/`."""


def sample(outcome: Outcome = Outcome.OK, sample_index: int = 0, length: int = 2) -> Trajectory:
    score = float(sample_index) if outcome is Outcome.OK else None
    options = {"source": "math", "sample_index": sample_index, "outcome": outcome}
    return trajectory(score, [1] * length, **options)


def emitted() -> set[str]:
    """Returns the metrics of a rollout with every outcome and with every model that a run can have."""
    finished = [sample(sample_index=i, length=2 + i) for i in range(8)]
    finished[0] = replace(finished[0], weight_versions=runs([-1, 0]))
    everything = finished + [sample(outcome) for outcome in Outcome if outcome is not Outcome.OK]
    batch = Batch.of(finished, version=0)
    ones = np.ones(batch.num_actions.sum(), np.float32)
    algo = AlgoConfig(advantage=AdvantageConfig(estimator="gae"))
    _, metrics = compute_advantages(
        replace(batch, log_probs=-ones, ref_log_probs=-ones, teacher_log_probs=-ones, values=ones),
        finished,
        estimator=algo.build_estimator(),
        algo=algo,
        reward=RewardConfig(),
        kl_coef=0.1,
        max_new_tokens=8,
        teacher_coef=1.0,
    )
    # the sources score and verdict
    evaluations = [*evaluation_metrics(everything), *evaluation_metrics(finished[:2])]
    return {*rollout_metrics(everything, 0), *evaluations, *metrics}


def written() -> set[str]:
    """Returns the metric names that the code has as literals."""
    files = [
        *(ROOT / "openrlhf" / "training").glob("*.py"),
        *(ROOT / "openrlhf" / "algorithms").rglob("*.py"),
        ROOT / "openrlhf" / "observability" / "rollout_metrics.py",
        ROOT / "openrlhf" / "cluster" / "engine_pool.py",
        *(
            ROOT / "openrlhf" / "training" / "objectives" / name
            for name in ("policy.py", "critic.py", "ptx.py")
        ),
    ]
    return {name for f in files for name in re.findall(rf'"((?:{SECTIONS})/\w+)"', f.read_text())}


def all_names() -> set[str]:
    filtering = {f"rollout/{filter_result}_ratio" for filter_result in FilterResult}
    memory = memory_metrics([dict.fromkeys((*PHASES.values(), "generate", "sync"), 0)]).keys()
    balance = {"policy/balance_loss", "critic/balance_loss"}
    balance |= {f"rollout/math_{name}" for name in OF_SOURCES}
    return (
        emitted() | written() | memory | filtering | balance | ENGINE | {f"critic/{name}" for name in ENGINE}
    )


def test_every_metric_is_documented():
    names = all_names()
    assert len(names) > 50
    assert not {name for name in names if not any(p.fullmatch(name) for p in PATTERNS)}


def test_every_documented_metric_exists():
    names = all_names()
    assert not [p.pattern for p in PATTERNS if not any(p.fullmatch(name) for name in names)]
