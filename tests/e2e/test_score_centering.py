"""Score centering on the real stack: the engine's most likely tokens reach the loss with their actions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_rl import COMMON, train

from openrlhf.models.loading import load_causal_lm
from openrlhf.observability.journal import read_journal
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.types import Trajectory, not_none

pytestmark = [pytest.mark.usefixtures("running_ray"), pytest.mark.slow]
FLAGS = (
    f"{COMMON} --train.force_on_policy --algo.advantage.score_centering_top_k 6 --algo.kl.init_coef 0 "
    "--actor.adam.lr 1e-3 --actor.num_gpus_per_node 1 --train.colocate_all --eval.steps -1 "
    "--rollout.temperature 0.8"
)


def journal(folder: Path, step: int) -> list[Trajectory]:
    return read_journal(folder / "run" / "rollouts" / f"step_{step:06d}.parquet")


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--algo.advantage.is_correction_level token",
        "--rollout.top_p 0.9",
        "--rollout.engine transformers",
    ],
)
def test_engine_and_policy_agree_on_the_likely_tokens(task: TaskFiles, tmp_path: Path, more: str) -> None:
    """In float32, with samples of its own weights, a policy has no drift but rounding. The recorded tokens of
    the first step are the most likely ones of the model that it began with."""
    metrics = train(task, tmp_path, f"{FLAGS} {more}")
    for step in (1, 2):
        assert metrics[step]["policy/centering_shift"] < 1e-4
        assert 0.05 < metrics[step]["policy/centered_mass"] <= 1 + 1e-6
        assert metrics[step]["grad_norm"] > 0
    model = load_causal_lm(str(task.model), flag="--model", dtype="fp32", attention="eager").eval()
    for t in journal(tmp_path, 1)[:4]:
        with torch.no_grad():
            logits = model(torch.from_numpy(t.token_ids)[None].long()).logits[0].float() / 0.8
        places, likely = np.flatnonzero(t.action_mask) - 1, not_none(t.likely)
        expected = logits[places].log_softmax(-1)
        ids = torch.from_numpy(likely["id"].astype(np.int64))
        found = torch.from_numpy(likely["log_prob"].copy())
        if "top_p" in more:
            inside = found.isfinite()
            assert inside[:, 0].all() and likely.shape[1] == 6
            expected = expected.gather(1, ids) - expected.gather(1, ids[:, :1]) + found[:, :1]
            torch.testing.assert_close(found[inside], expected[inside], atol=1e-4, rtol=0)
        else:
            torch.testing.assert_close(found, expected.topk(6).values, atol=1e-4, rtol=0)
            torch.testing.assert_close(found, expected.gather(1, ids), atol=1e-4, rtol=0)


def test_samples_of_older_weights_on_two_ranks(task: TaskFiles, tmp_path: Path) -> None:
    """Answers continue under new weights, so the recorded tokens of one sequence have several versions. The
    sampler differs from the policy, which centering removes."""
    flags = FLAGS.replace("--actor.num_gpus_per_node 1 --train.colocate_all", "--actor.num_gpus_per_node 2")
    metrics = train(
        task,
        tmp_path,
        f"{flags} --ds.zero_stage 3 --train.async_enable --train.async_queue_size 2 "
        "--train.partial_rollout_enable --train.max_steps 4 --rollout.batch_size 2 --data.max_len 480 "
        "--rollout.max_new_tokens 400 --actor.adam.lr 1e-2",
    )
    steps = [journal(tmp_path, step) for step in range(1, 5)]
    assert any(len(t.weight_versions) > 1 for step in steps for t in step)
    assert all(not_none(t.likely).shape == (t.num_actions, 6) for step in steps for t in step)
    assert max(metrics[step]["policy/centering_shift"] for step in metrics) > 1e-3
