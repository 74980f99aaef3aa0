"""`openrlhf rehearse` of whole runs with real processes, and of one whose reward function fails."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from openrlhf.tasks.prepare import TaskFiles
from openrlhf.tasks.prepare_pictures import prepare_pictures
from openrlhf.tools.plan.flags import rehearse
from openrlhf.tools.plan.rehearsal.stages import FAILED, LEFT_OUT, OK

pytestmark = pytest.mark.slow
SUPERVISED = "--data.apply_chat_template --data.max_len 128 --train.backend torch --train.batch_size 64"
RL = (
    "--data.apply_chat_template --data.label_key label --data.max_len 128 --rollout.engine transformers "
    "--rollout.batch_size 32 --rollout.n_samples_per_prompt 4 --train.batch_size 64 --train.backend torch "
    "--actor.num_gpus_per_node 4 --vllm.num_engines 4 --vllm.gpu_memory_utilization 0.8 "
    "--algo.advantage.estimator group_norm --algo.kl.init_coef 0 --eval.steps 10 "
)
AGENT = Path(__file__).parents[2] / "examples" / "python" / "agent_retry.py"


def rehearsed(
    words: str, capsys: pytest.CaptureFixture[str], cluster: str = "8xH100"
) -> tuple[Any, dict[str, Any]]:
    with pytest.raises(SystemExit) as stop:
        rehearse([*words.split(), "--cluster", cluster, "--json"])
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


VARIANTS = {
    "sequence parallelism": "sft 8xH100 --train.backend deepspeed --ds.ring_attn_size 2",
    "tensor parallelism": "sft 8xH100 --train.backend deepspeed --ds.tensor_parallel_size 2",
    "64 GPUs": "sft 8x8xH100-80GB",
    "adapters": "sft 8xH100 --ds.lora.rank 4",
    "pairs": "dpo 8xH100",
    "reward model": "rm 8xH100",
    "critic": "ppo 2x8xH100 --algo.advantage.estimator gae --critic.num_gpus_per_node 2",
    "reference": "ppo 2x8xH100 --algo.kl.init_coef 0.01 --ref.num_gpus_per_node 2",
    "asynchronous": "ppo 8xH100 --train.async_enable",
    "adapters of RL": "ppo 8xH100 --ds.lora.rank 4",
    "agent": f"agent 8xH100 --train.agent_func_path {AGENT} --train.max_turns 3",
    "pictures": "pictures 8xH100 --rollout.engine vllm --data.max_images_per_prompt 1",
}
"""Kind of run, cluster and further flags of each rehearsed run."""


@pytest.fixture(scope="module")
def data(task: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the command and its inputs for each kind of run."""
    folder = tmp_path_factory.mktemp("rehearsed")
    pairs = folder / "pairs.jsonl"
    pairs.write_text(
        "".join(
            json.dumps({"prompt": row["input"], "chosen": row["output"], "rejected": row["output"][::-1]})
            + "\n"
            for row in map(json.loads, task.sft.read_text().splitlines())
        )
    )
    pictures = prepare_pictures(folder / "pictures", num_pictures=64, num_eval=8)
    of_model = f"--model.model_name_or_path {task.model} {SUPERVISED}"
    of_pairs = f"{of_model} --data.dataset {pairs} --data.prompt_key prompt"
    of_policy = f"--actor.model_name_or_path {task.model} --data.prompt_dataset {task.prompts} {RL}"
    return {
        "sft": f"sft {of_model} --data.dataset {task.sft} --data.output_key output",
        "dpo": f"dpo {of_pairs}",
        "rm": f"rm {of_pairs}",
        "ppo": f"ppo {of_policy} --reward.remote_url {task.reward}",
        "agent": f"ppo {of_policy}",
        "pictures": (
            f"ppo --actor.model_name_or_path {pictures.model} --data.prompt_dataset {pictures.prompts} {RL} "
            f"--reward.remote_url {pictures.reward}"
        ),
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_run(name, data, capsys, record_property):
    kind, cluster, *flags = VARIANTS[name].split()
    start = time.monotonic()
    code, found = rehearsed(f"{data[kind]} {' '.join(flags)}", capsys, cluster)
    record_property("figure", f"{name}: {time.monotonic() - start:.0f} s")
    assert not [stage for stage in found["stages"] if stage["outcome"] == FAILED]
    assert code == 0 and found["ok"], found
    assert OK in {stage["outcome"] for stage in found["stages"]}
