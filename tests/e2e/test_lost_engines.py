"""Engines that are killed while they sample: they are replaced, and the run samples the same tokens."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from test_rl import COMMON, train

from openrlhf.observability.journal import read_journal
from openrlhf.tasks.prepare import TaskFiles

pytestmark = pytest.mark.usefixtures("running_ray")
REWARD = f"--reward.remote_url {Path(__file__).with_name('killing_reward.py')} --reward.num_workers 1"
FLAGS = (
    f"{COMMON} --algo.kl.init_coef 0 --actor.adam.lr 1e-3 --reward.batch 1 --train.max_steps 2 "
    "--eval.steps 0 --actor.num_gpus_per_node 1 --rollout.batch_size 4 --train.batch_size 16"
)
Sampled = dict[tuple[int, int, int], tuple]


def sampled(folder: Path) -> Sampled:
    """Returns prompt and sample -> the step that trained on it, its tokens and reward. Checks that no sample
    is there twice."""
    found = {}
    for path in sorted((folder / "run" / "rollouts").glob("step_*.parquet")):
        for t in read_journal(path):
            key = t.prompt.prompt_id, t.prompt.epoch, t.sample_index
            assert key not in found
            found[key] = path.name, t.token_ids.tolist(), t.reward
    return found


@pytest.mark.parametrize(
    ("engines", "victim", "flags"),
    [
        ("--rollout.engine transformers --vllm.num_engines 1", "ray::EngineActor", "--train.backend torch"),
        pytest.param(
            "--rollout.engine transformers --vllm.num_engines 2",
            "ray::EngineActor",
            "--train.async_enable --train.async_queue_size 1",
            marks=pytest.mark.slow,
        ),
        pytest.param("--vllm.num_engines 2", "VLLM::EngineCore", "", marks=pytest.mark.slow),
        pytest.param("--vllm.num_engines 1", "ray::EngineActor", "", marks=pytest.mark.slow),
    ],
    ids=["one", "two-async", "cores", "vllm"],
)
def test_a_run_that_loses_engines(task, tmp_path, monkeypatch, capfd, engines, victim, flags):
    monkeypatch.setenv("OPENRLHF_TEST_VICTIM", victim)
    check_lossy_run(task, tmp_path, monkeypatch, capfd, f"{engines} {flags}", (4, 20))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["", "--train.async_enable --train.async_queue_size 1"], ids=["sync", "async"]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_deaths(task, tmp_path, monkeypatch, capfd, seed, flags):
    """Five in each run: an engine that dies more often in ten minutes ends the run."""
    engine = f"--rollout.engine transformers --vllm.num_engines 1 --train.seed {seed}"
    check_lossy_run(task, tmp_path, monkeypatch, capfd, f"{engine} {flags}", (3, 9, 15, 21, 27))


def check_lossy_run(
    task: TaskFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    flags: str,
    killed_on: Sequence[int],
) -> None:
    """Trains with and without deaths on these calls of the reward function, and compares."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("OPENRLHF_TEST_KILLS", str(calls))
    monkeypatch.setenv("OPENRLHF_TEST_KILLED_ON", ",".join(map(str, killed_on)))
    whole = train(task, tmp_path / "whole", f"{FLAGS} {flags}", reward=REWARD)
    calls.write_bytes(b"")
    lossy = train(task, tmp_path / "lossy", f"{FLAGS} {flags}", reward=REWARD)
    err = capfd.readouterr().err
    assert calls.stat().st_size > killed_on[-1]
    assert err.count(" (restart ") == len(killed_on)
    a, b = sampled(tmp_path / "whole"), sampled(tmp_path / "lossy")
    assert a.keys() == b.keys() and len(a) == 2 * 16
    if "async" not in flags:  # an asynchronous run may sample with newer weights
        assert a == b
        for step, metrics in whole.items():
            same = {name for name in metrics if name.startswith(("policy/", "rollout/", "grad_norm"))}
            assert {name: lossy[step][name] for name in same} == {name: metrics[name] for name in same}
    assert sum(metrics.get("rollout/engine_restarts", 0) for metrics in lossy.values()) >= 1
    assert not any("rollout/engine_restarts" in metrics for metrics in whole.values())
