"""`--eval.eval_only` builds what sampling needs: the policy without optimizer states, and no other model."""

import pytest
from test_rl import COMMON, tokens_of, train

from openrlhf.cluster.roles import Roles
from openrlhf.loop import rl_command
from openrlhf.observability.journal import read_journal
from openrlhf.observability.trackers.metrics_file import read_metrics

BACKENDS = {
    "torch": [(3, "bf16"), (3, "fp32")],
    "deepspeed": [*((stage, "bf16") for stage in range(4)), (0, "fp32"), (3, "fp32")],
}
"""ZeRO stages and types of parameters."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_loaded_without_the_states_of_the_optimizer(task, run_worker, backend):
    jobs = [{"backend": backend, "stage": stage, "dtype": dtype} for stage, dtype in BACKENDS[backend]]
    for reports in run_worker("weights_alone", 2, model=str(task.model), jobs=jobs):
        for job, report in zip(jobs, reports, strict=True):
            assert report["state"] == {"step": 2} and report["steps"] == 2, job
            assert report["states"][0] > 0 and report["states"][1] == 0, job
            assert report["trained"] and report["same"], job


@pytest.mark.slow
@pytest.mark.usefixtures("running_ray")
@pytest.mark.parametrize(
    "place",
    [
        "--train.colocate_all",
        "--ref.num_gpus_per_node 1 --critic.num_gpus_per_node 1",
        "--train.backend torch --train.colocate_all",
    ],
)
def test_an_evaluation_alone_samples_as_the_run_that_trained(task, tmp_path, monkeypatch, place):
    """Greedy answers by the weights of the checkpoint. The critic and the reference, which the run had, are
    not built."""
    started: list[Roles] = []

    def start(*arguments) -> Roles:
        started.append(roles := start_roles(*arguments))
        return roles

    start_roles = rl_command.start_roles
    monkeypatch.setattr(rl_command, "start_roles", start)
    flags = (
        f"{COMMON.replace('group_norm', 'gae')} {place} --rollout.engine transformers "
        "--algo.kl.init_coef 0.01 --actor.num_gpus_per_node 1 --actor.adam.lr 1e-2 --critic.adam.lr 1e-2 "
        "--ckpt.save_steps 2 "
    )
    train(task, tmp_path, flags)
    only = f"{flags} --eval.eval_only --ckpt.load_enable --logger.run_dir {tmp_path / 'only'}"
    train(task, tmp_path, only)
    (at,) = read_metrics(tmp_path / "only" / "metrics.jsonl")
    answers = lambda run, step: tokens_of(
        read_journal(tmp_path / run / "rollouts" / f"eval_{step:06d}.parquet")
    )
    assert at == 2 and answers("only", 2) == answers("run", 2) != answers("run", 0)
    assert [set(roles.models) for roles in started] == [{"policy", "critic", "reference"}, {"policy"}]
    assert started[1].reference is None
