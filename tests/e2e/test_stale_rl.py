"""Actions of several versions in one step: each is weighted by the age of the weights that chose it."""

from pathlib import Path

import numpy as np
import pytest
from test_async_rl import AHEAD, FLAGS, PLACES, steps_of
from test_rl import COMMON, train

from openrlhf.observability.journal import journal_steps, read_table
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.types import Trajectory

pytestmark = pytest.mark.usefixtures("running_ray")


def staleness_of(step: list[Trajectory], version: int) -> np.ndarray:
    """Returns the (A,) staleness that the journal records."""
    versions = np.concatenate([np.repeat(*t.weight_versions.T) for t in step])
    return version - versions


@pytest.mark.slow
def test_staleness_reaches_the_loss_on_every_rank(task: TaskFiles, tmp_path: Path) -> None:
    """A step of one update, before which no forward pass runs, reports the mismatch of each age."""
    flags = (
        f"{FLAGS} {PLACES['separate']} {AHEAD['pauses']} --algo.advantage.proximal_policy interpolated "
        "--algo.advantage.is_correction_enable --algo.advantage.staleness_decay 0.5 "
        "--algo.advantage.max_token_staleness 1"
    )
    metrics = train(task, tmp_path, flags)
    ages = [staleness_of(step, number) for number, step in enumerate(steps_of(tmp_path))]
    assert any(len(np.unique(age)) > 1 for age in ages) and max(age.max() for age in ages) > 1
    for row, age in zip([metrics[number] for number in range(1, 5)], ages, strict=True):
        if not age.any():
            assert not any("staleness_masked" in name for name in row)
            continue
        error = len(age) * 2**-24  # error of a float32 sum in any order
        told = row["policy/staleness_masked_fraction"], row["policy/staleness_weight_mean"]
        assert told == pytest.approx(((age > 1).mean(), np.where(age > 1, 0, 0.5**age).mean()), abs=error)
        kinds = np.unique(age.clip(max=3))
        of_ages = [name for name in row if name.startswith("mismatch/kl_staleness_")]
        assert len(of_ages) == (len(kinds) if len(kinds) > 1 else 0)
        if len(kinds) > 1 and 0 in kinds:
            assert row["mismatch/abs_diff_mean_staleness_0"] < 1e-4
            assert row["mismatch/abs_diff_mean_staleness_0"] < row["mismatch/abs_diff_mean"]


@pytest.mark.slow
def test_a_clip_that_counts_from_the_sampler_needs_no_forward_pass(task: TaskFiles, tmp_path: Path) -> None:
    """Two optimizer steps train on fresh samples, and the ratio to the sampler is 1 before the first: its
    mean reflects what the first step has changed. Nothing computes the policy's log-probs before them; the
    first step's own forward pass gives the mismatch."""
    flags = f"{COMMON} {PLACES['alone']} --algo.kl.init_coef 0 --actor.adam.lr 1e-4 --train.max_steps 1"
    metrics = train(task, tmp_path, f"{flags} --algo.advantage.proximal_policy rollout")
    assert 1e-5 < abs(metrics[1]["policy/ppo_kl"]) < 1e-2
    assert metrics[1]["mismatch/abs_diff_max"] < 1e-4
    table = read_table(journal_steps(tmp_path / "run" / "rollouts")[1])
    assert table["log_probs"].null_count == len(table) == 32
