"""docs/metrics.md has every metric of reinforcement learning, and no other."""

import re
from pathlib import Path

import torch

from openrlhf.config.ppo import AdvantageConfig, AlgoConfig, RewardConfig
from openrlhf.trainer.collect import Verdict
from openrlhf.trainer.credit import assign_credit
from openrlhf.trainer.diagnostics import rollout_metrics
from openrlhf.trainer.evaluate import evaluation_metrics
from openrlhf.types import Outcome, Prompt, Sample, Scores, Trajectory

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text().partition("## What looks unhealthy")[0]
SECTIONS = "rollout|reward|advantage|kl|teacher|mismatch|policy|critic|eval"
DOCUMENTED = set(re.findall(rf"`((?:{SECTIONS})/[\w{{}}]+|grad_norm|lr|num_tokens)`", PAGE))
PATTERNS = [re.compile(re.sub(r"{\w+}", r"\\w+", name)) for name in DOCUMENTED if name != "rollout/{name}"]
ENGINE = {"grad_norm", "lr", "num_tokens"}
"""What DeepSpeedEngine.train_step adds; with `critic/` in front for the critic."""


def trajectory(outcome: Outcome = Outcome.OK, sample_index: int = 0, length: int = 2) -> Trajectory:
    score = float(sample_index) if outcome is Outcome.OK else None
    return Trajectory(
        prompt=Prompt(prompt_id=0, text="", source="math"),
        sample_index=sample_index,
        token_ids=[1] * (1 + length),
        action_mask=[False] + [True] * length,
        rollout_log_probs=[-1.0] * length,
        weight_versions=[0] * length,
        reward=score,
        score=score,
        outcome=outcome,
    )


def emitted() -> set[str]:
    """By a rollout with every outcome, and with every model there is."""
    finished = [trajectory(sample_index=i, length=2 + i) for i in range(8)]
    everything = finished + [trajectory(outcome) for outcome in Outcome if outcome is not Outcome.OK]
    ones = [torch.ones(t.num_actions) for t in finished]
    scores = [Scores(log_probs=-x, ref_log_probs=-x, teacher_log_probs=-x, values=x) for x in ones]
    credit = assign_credit(
        [Sample.of(t) for t in finished],
        scores,
        finished,
        algo=AlgoConfig(advantage=AdvantageConfig(estimator="gae")),
        reward=RewardConfig(),
        kl_coef=0.1,
        max_new_tokens=8,
        teacher_coef=1.0,
    )
    evaluations = [*evaluation_metrics(everything), *evaluation_metrics(finished[:2])]  # scores, verdicts
    return {*rollout_metrics(everything, 0), *evaluations, *credit.metrics}


def written() -> set[str]:
    """In the code, as literals."""
    files = [
        *(ROOT / "openrlhf" / "trainer").glob("*.py"),
        *(ROOT / "openrlhf" / "algos").glob("*.py"),
        *(ROOT / "openrlhf" / "objectives" / name for name in ("actor.py", "critic.py", "ptx.py")),
    ]
    return {name for f in files for name in re.findall(rf'"((?:{SECTIONS})/\w+)"', f.read_text())}


def all_names() -> set[str]:
    filtering = {f"rollout/{verdict}_ratio" for verdict in Verdict}
    balance = {"policy/balance_loss", "critic/balance_loss"}
    return emitted() | written() | filtering | balance | ENGINE | {f"critic/{name}" for name in ENGINE}


def test_every_metric_is_documented():
    names = all_names()
    assert len(names) > 50
    assert not {name for name in names if not any(p.fullmatch(name) for p in PATTERNS)}


def test_every_documented_metric_exists():
    names = all_names()
    assert not [p.pattern for p in PATTERNS if not any(p.fullmatch(name) for name in names)]
