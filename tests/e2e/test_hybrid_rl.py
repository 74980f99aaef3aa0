"""Reinforcement learning of a model with linear attention: the engine computes it token by token, the trainer
one sequence at a time."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_moe_training import hybrid
from test_rl import COMMON, train

from openrlhf.tasks.prepare import TaskFiles

__all__ = ["hybrid"]
pytestmark = [pytest.mark.usefixtures("running_ray"), pytest.mark.slow]


def test_sampler_and_trainer_agree_and_weights_arrive(task: TaskFiles, hybrid: Path, tmp_path: Path) -> None:
    """In bfloat16, the only dtype of vLLM's CPU kernels for it, both agree within rounding."""
    common = COMMON.replace("fp32", "bf16")
    flags = f"{common} --algo.kl.init_coef 0.01 --actor.adam.lr 1e-3 --eval.steps -1 --train.colocate_all"
    metrics = train(replace(task, model=hybrid), tmp_path, f"{flags} --actor.num_gpus_per_node 1")
    for step in (1, 2):
        assert metrics[step]["mismatch/abs_diff_mean"] < 0.03
        assert metrics[step]["mismatch/ess"] > 0.99
