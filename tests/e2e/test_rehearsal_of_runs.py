"""`openrlhf rehearse` of whole runs with real processes, and of one whose reward function fails."""

import json
from pathlib import Path
from typing import Any

import pytest

from openrlhf.cli import rehearse
from openrlhf.planning.rehearsal.stages import FAILED, LEFT_OUT, OK
from openrlhf.tasks.prepare import TaskFiles

pytestmark = pytest.mark.slow
SUPERVISED = "--data.apply_chat_template --data.max_len 128 --train.backend torch --train.batch_size 64"
RL = (
    "--data.apply_chat_template --data.label_key label --data.max_len 128 --rollout.engine transformers "
    "--rollout.batch_size 32 --rollout.n_samples_per_prompt 4 --train.batch_size 64 --train.backend torch "
    "--actor.num_gpus_per_node 4 --vllm.num_engines 4 --vllm.gpu_memory_utilization 0.8 "
    "--algo.advantage.estimator group_norm --algo.kl.init_coef 0 --eval.steps 10 "
)


def rehearsed(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, dict[str, Any]]:
    with pytest.raises(SystemExit) as stop:
        rehearse.main([*words.split(), "--cluster", "8xH100", "--json"])
    return stop.value.code, json.loads(capsys.readouterr().out)


def test_sft(task: TaskFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, found = rehearsed(
        f"sft --model.model_name_or_path {task.model} --data.dataset {task.sft} --data.output_key output "
        f"{SUPERVISED} --eval.dataset {task.sft} --ckpt.output_dir theirs",
        capsys,
    )
    assert code == 0 and found["ok"], found
    assert {stage["outcome"] for stage in found["stages"]} == {OK}
    assert not list(tmp_path.iterdir())


def test_ppo(task: TaskFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = f"ppo --actor.model_name_or_path {task.model} --data.prompt_dataset {task.prompts} {RL}"
    code, found = rehearsed(f"{flags} --reward.remote_url {task.reward} --eval.dataset {task.eval}", capsys)
    assert code == 0 and found["ok"], found
    assert {stage["outcome"] for stage in found["stages"]} == {OK}
    assert not list(tmp_path.iterdir())
    Path("reward.py").write_text("def reward_func(queries, prompts, labels): return 1 / 0")
    code, found = rehearsed(f"{flags} --reward.remote_url reward.py", capsys)
    outcomes = {stage["name"]: stage for stage in found["stages"]}
    assert code == 1 and outcomes["run"]["outcome"] == FAILED
    assert "ZeroDivisionError" in outcomes["run"]["evidence"]
    assert outcomes["checkpoint and resume"]["outcome"] == LEFT_OUT
