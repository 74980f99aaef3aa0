"""Engines whose copy of the weights becomes wrong in the middle of a run stop the run before it learns from
their samples."""

from pathlib import Path

import pytest
from test_rl import COMMON, train

from openrlhf.observability.trackers.metrics_file import read_metrics

pytestmark = pytest.mark.usefixtures("running_ray")
FLAGS = (
    f"{COMMON} --algo.kl.init_coef 0 --actor.adam.lr 1e-3 --train.batch_size 32 --train.max_steps 6 "
    "--eval.steps -1 --ds.zero_stage 2 --actor.num_gpus_per_node 1 --train.colocate_all"
)
ADAPTERS = "--ds.lora.rank 4 --ds.lora.alpha 8 --vllm.lora_sync adapter"


@pytest.mark.parametrize(
    ("fault", "flags", "steps", "told"),
    [
        # Sync 0 fills the engine, the fault waits for sync 1, and samples of sync 2's weights are refused.
        ("stale", "", 2, "weight sync 2: .* the first that differs is model.layers.0.mlp"),
        pytest.param(
            "roll",
            "--ds.param_dtype bf16",
            2,
            "weight sync 2: .* the first that differs is model.layers.1.self_attn.o_proj",
            marks=pytest.mark.slow,
        ),
        pytest.param("unused adapter", ADAPTERS, 0, "weight sync 0: ", marks=pytest.mark.slow),
        pytest.param(
            "unused adapter",
            f"{ADAPTERS} --ds.param_dtype bf16",
            0,
            "weight sync 0: ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fault_that_checksums_do_not_see(task, tmp_path, monkeypatch, fault, flags, steps, told):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the fault is sent as a function
    agent = tmp_path / "agent.py"
    agent.write_text(Path(__file__).with_name("faulty_agent.py").read_text().replace('"FAULT"', f'"{fault}"'))
    with pytest.raises(RuntimeError, match=f"(?s){told}"):
        train(task, tmp_path, f"{FLAGS} {flags}", reward=f"--train.agent_func_path {agent}")
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert len(read_metrics(metrics) if metrics.exists() else {}) == steps
    assert not (tmp_path / "policy").exists()
