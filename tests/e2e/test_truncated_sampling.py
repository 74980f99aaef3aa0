"""Top-p and top-k sampling on the real stack: the trainer's log-probs are those of the truncated distribution
that was sampled from."""

from pathlib import Path

import pytest
from test_rl import COMMON, train

from openrlhf.observability.journal import read_journal
from openrlhf.tasks.prepare import TaskFiles

pytestmark = [pytest.mark.usefixtures("running_ray"), pytest.mark.slow]
FLAGS = (
    f"{COMMON} --algo.kl.init_coef 0.01 --actor.adam.lr 1e-3 --actor.entropy_coef 0 "
    "--actor.num_gpus_per_node 1 --train.colocate_all --eval.steps -1"
)


@pytest.mark.parametrize(
    "sampling",
    [
        "--rollout.top_p 0.9",
        "--rollout.top_k 20",
        "--rollout.top_k 20 --rollout.engine transformers",
        # the probability mass of the left-out tokens is known
        "--rollout.top_p 0.9 --rollout.max_kept_tokens 2",
    ],
)
def test_the_trainer_has_the_distribution_that_was_sampled(task, tmp_path, sampling):
    metrics = train(task, tmp_path, f"{FLAGS} {sampling} --rollout.temperature 0.8")
    for step in (1, 2):
        assert metrics[step]["mismatch/abs_diff_max"] < 1e-4
    assert metrics[1]["kl/mean"] == pytest.approx(0, abs=1e-6)  # the policy still is the reference


def test_an_answer_that_goes_on_after_a_sync(task: TaskFiles, tmp_path: Path) -> None:
    """Paused engines compute the tokens of their answers again, and report each kept set once: with weights
    that do not move the log-probs of all versions agree."""
    metrics = train(
        task,
        tmp_path,
        f"{FLAGS.replace('--actor.adam.lr 1e-3', '--actor.adam.lr 0')} --rollout.top_p 0.9 "
        "--train.async_enable --train.async_queue_size 2 --train.partial_rollout_enable --train.max_steps 4 "
        "--rollout.batch_size 2 --train.batch_size 8 --data.max_len 480 --rollout.max_new_tokens 400",
    )
    steps = [read_journal(tmp_path / "run" / "rollouts" / f"step_{step:06d}.parquet") for step in range(1, 5)]
    assert any(len(t.weight_versions) > 1 for step in steps for t in step)
    for step in metrics:
        assert metrics[step]["mismatch/abs_diff_max"] < 1e-4


def test_over_the_whole_vocabulary_they_differ(task: TaskFiles, tmp_path: Path) -> None:
    """Log-probs differ by the mass of the left-out tokens: up to -log(0.9) each."""
    metrics = train(task, tmp_path, f"{FLAGS} --rollout.top_p 0.9 --rollout.max_kept_tokens 0")
    assert metrics[1]["mismatch/abs_diff_max"] > 0.05
