"""Properties of a whole run that only a CUDA device shows."""

import shlex
from pathlib import Path

import pytest
import torch

from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.loop.rl_command import run
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("stage", [2, 3])
def test_hybrid_engine_on_one_gpu(tmp_path: Path, stage: int) -> None:
    """The trainer and the engine share the GPU and sleep in turns; weights travel by CUDA IPC."""
    task = prepare(tmp_path / "task", num_pretrain=8, num_sft=8, num_prompts=32, num_eval=8)
    argv = shlex.split(
        f"--actor.model_name_or_path {task.model} --data.prompt_dataset {task.prompts} "
        f"--data.label_key label --data.apply_chat_template --data.max_len 96 "
        f"--reward.remote_url {task.reward} --rollout.max_new_tokens 16 "
        f"--algo.advantage.estimator reinforce --rollout.batch_size 8 --rollout.n_samples_per_prompt 2 "
        f"--train.batch_size 16 --train.max_steps 2 --train.colocate_all --actor.num_gpus_per_node 1 "
        f"--vllm.enable_sleep --vllm.enforce_eager --vllm.gpu_memory_utilization 0.3 --ds.enable_sleep "
        f"--ds.zero_stage {stage} --ckpt.output_dir {tmp_path / 'policy'} --logger.run_dir {tmp_path / 'run'}"
    )
    run(parse(PPO, argv).config, argv)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    whole = torch.cuda.get_device_properties(0).total_memory / 2**30
    for step in (1, 2):
        assert metrics[step]["mismatch/abs_diff_mean"] < 2e-2
        for phase in ("generate", "logprobs", "update", "sync"):
            assert 0 < metrics[step][f"memory/{phase}_gb"] <= whole, (step, phase)
