"""Processes that hang, because they are stopped: engines are replaced, and a rank ends the run."""

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from test_endings import rl
from test_lost_engines import FLAGS, REWARD, sampled
from test_rl import train

from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare import TaskFiles

LIMIT = 30


@pytest.mark.slow
@pytest.mark.usefixtures("running_ray")
@pytest.mark.parametrize(
    "variables",
    [
        {"OPENRLHF_TEST_VICTIM": "VLLM::EngineCore"},
        {"OPENRLHF_TEST_VICTIM": "ray::EngineActor"},
        {"OPENRLHF_FAULT": "sync.load:stop@3"},
    ],
    ids=["core-samples", "actor", "core-syncs"],
)
def test_an_engine_that_hangs_is_replaced(task, tmp_path, monkeypatch, capfd, variables):
    """The run samples the same tokens as without it."""
    flags = f"{FLAGS} --train.max_steps 3 --vllm.num_engines 1 --rollout.engine_timeout {LIMIT}"
    calls = tmp_path / "calls"
    monkeypatch.setenv("OPENRLHF_TEST_KILLS", str(calls))
    monkeypatch.setenv("OPENRLHF_TEST_SIGNAL", "SIGSTOP")
    train(task, tmp_path / "whole", flags, reward=REWARD)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if "OPENRLHF_FAULT" not in variables:
        calls.write_bytes(b"." * 15)  # one of the two calls on which it stops is left
    capfd.readouterr()
    train(task, tmp_path / "stopped", flags, reward=REWARD)
    said = capfd.readouterr().err
    assert said.count(" (restart ") == 1 and f" for {LIMIT}" in said, said
    assert sampled(tmp_path / "whole") == sampled(tmp_path / "stopped")
    metrics = read_metrics(tmp_path / "stopped" / "run" / "metrics.jsonl")
    assert sum(step.get("rollout/engine_restarts", 0) for step in metrics.values()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_engines")
def test_a_rank_that_hangs_ends_the_run_with_all_stacks(task: TaskFiles, tmp_path: Path) -> None:
    began = time.monotonic()
    done = in_own_process(
        f"{rl(task, tmp_path, '--actor.num_gpus_per_node 1 --rollout.engine transformers')} "
        f"--train.rank_timeout {LIMIT}",
        OPENRLHF_FAULT="step.loss:stop@2",
    )
    assert done.returncode == 1, done.stderr[-3000:]
    (noticed,) = (line for line in done.stderr.splitlines() if "has not answered for 2" in line)
    assert noticed.startswith("rank 0 of policy (process ")
    assert "a rank of the policy died: process " in done.stderr and "Traceback" not in done.stderr
    stacks = (tmp_path / "run" / "stacks.txt").read_text()
    assert "== the driver\n" in stacks and "== engine 0\nthread" in stacks
    assert "== rank 0 of policy\nit does not answer" in stacks
    print(f"ended after {time.monotonic() - began:.0f} s")


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_engines")
def test_a_rank_that_hangs_while_models_load_ends_the_run_with_its_stack(task, tmp_path):
    """It answers, so nothing but the work of the processes tells that no one goes on."""
    done = in_own_process(
        f"{rl(task, tmp_path, '--actor.num_gpus_per_node 1 --rollout.engine transformers')} "
        f"--train.rank_timeout {LIMIT}",
        OPENRLHF_FAULT="rank.load:sleep=800",
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert "has work but made no progress for " in done.stderr and "Traceback" not in done.stderr
    of_rank = (tmp_path / "run" / "stacks.txt").read_text().partition("== rank 0 of policy\n")[2]
    assert "time.sleep(each.value)" in of_rank.partition("\n== ")[0]


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_engines")
def test_a_run_that_restarts_equals_an_undisturbed_one(task: TaskFiles, tmp_path: Path) -> None:
    """A rank dies once in step 4; the run resumes from the checkpoint of step 2."""
    found = []
    for name, variables in {"whole": {}, "killed": {"OPENRLHF_FAULT": "step.loss:kill@4"}}.items():
        command = rl(task, tmp_path / name, "--actor.num_gpus_per_node 1 --rollout.engine transformers")
        done = in_own_process(
            f"{command} --ckpt.save_steps 2 --train.max_restarts 1 --train.max_steps 5", **variables
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("restart 1 of at most 1 (--train.max_restarts)" in done.stderr) == (name == "killed")
        found.append(read_metrics(tmp_path / name / "run" / "metrics.jsonl"))
    whole, killed = found
    assert whole.keys() == killed.keys() == {1, 2, 3, 4, 5}
    for step, metrics in whole.items():
        same = {key for key in metrics if key.startswith(("policy/", "rollout/", "reward", "grad_norm"))}
        assert {key: killed[step][key] for key in same} == {key: metrics[key] for key in same}
    weights = [tmp_path / name / "out_dir" / "model.safetensors" for name in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def in_own_process(command: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs a command that joins no cluster."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        shlex.split(command), env=environment | variables, capture_output=True, text=True, timeout=900
    )
