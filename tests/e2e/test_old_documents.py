"""Commands from documents of five generations. Only names of models and files are replaced; flags appended to
a command cut sizes to two cores, because the last value of a flag wins."""

import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from processes import run_ranks

from openrlhf.observability.trackers.metrics_file import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("running_ray")]

FLAT_SUPERVISED = """
    --save_steps -1 --logging_steps 1 --eval_steps -1 --gradient_checkpointing --max_epochs 1
    --zero_stage {stage}
"""
FLAT_RL = """
    --save_path /openrlhf/final --ckpt_path /openrlhf/ckpt --save_hf_ckpt --micro_train_batch_size 8
    --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 1024 --max_epochs 1
    --prompt_max_len 1024 --max_samples 100000 --generate_max_len 1024 --zero_stage 3
    --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01
    --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --apply_chat_template
    --gradient_checkpointing --packing_samples --vllm_sync_backend nccl --enforce_eager
"""
DOCUMENTS: dict[str, str] = {
    "flat, up to 0.8.9: SFT": f"""
    deepspeed --module openrlhf.cli.train_sft --max_len 4096 --dataset Open-Orca/OpenOrca
    --input_key question --output_key response --input_template $'User: {{}}\\nAssistant: '
    --train_batch_size 256 --micro_train_batch_size 2 --max_samples 500000
    --pretrain meta-llama/Meta-Llama-3-8B --save_path ./checkpoint/llama3-8b-sft
    {FLAT_SUPERVISED.format(stage=2)} --packing_samples --bf16 --flash_attn --learning_rate 5e-6
    --load_checkpoint --lora_rank 8 --lora_alpha 32
    """,
    "flat, up to 0.8.9: reward model": f"""
    deepspeed --module openrlhf.cli.train_rm --save_path ./checkpoint/llama3-8b-rm
    {FLAT_SUPERVISED.format(stage=3)} --train_batch_size 256 --micro_train_batch_size 1
    --pretrain OpenRLHF/Llama-3-8b-sft-mixture --bf16 --max_len 8192 --learning_rate 9e-6
    --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template --chosen_key chosen
    --rejected_key rejected --flash_attn --packing_samples --load_checkpoint
    """,
    "flat, up to 0.8.9: DPO": f"""
    deepspeed --module openrlhf.cli.train_dpo --save_path ./checkpoint/llama3-8b-dpo
    {FLAT_SUPERVISED.format(stage=3)} --train_batch_size 256 --micro_train_batch_size 1
    --pretrain OpenRLHF/Llama-3-8b-sft-mixture --bf16 --max_len 8192 --learning_rate 5e-7 --beta 0.1
    --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template --chosen_key chosen
    --rejected_key rejected --flash_attn --load_checkpoint --packing_samples --ref_offload --nll_loss_coef 0.2
    """,
    "flat, up to 0.8.9: KTO": f"""
    deepspeed --module openrlhf.cli.train_kto --save_path ./checkpoint/llama3-8b-kto
    {FLAT_SUPERVISED.format(stage=3)} --train_batch_size 64 --micro_train_batch_size 1
    --pretrain OpenRLHF/Llama-3-8b-sft-mixture --bf16 --max_len 8192 --learning_rate 5e-7
    --dataset Dylan2048/ultrafeedback-unpaired-preferences --input_key instruction --output_key response
    --label_key score --flash_attn --beta 0.1
    """,
    "flat, up to 0.8.9: PPO, hybrid engine": f"""
    python3 -m openrlhf.cli.train_ppo_ray --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1
    --reward_num_gpus_per_node 8 --critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1
    --actor_num_gpus_per_node 8 --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models
    --vllm_gpu_memory_utilization 0.5 --pretrain OpenRLHF/Llama-3-8b-sft-mixture
    --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k {FLAT_RL} --n_samples_per_prompt 1 --bf16 --normalize_reward
    --vllm_enable_sleep --deepspeed_enable_sleep --flash_attn
    """,
    "flat, up to 0.8.9: REINFORCE++ with PPO-ptx": f"""
    python3 -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 --actor_num_gpus_per_node 8 --ref_num_nodes 1
    --ref_num_gpus_per_node 8 --colocate_actor_ref --vllm_num_engines 4 --vllm_tensor_parallel_size 2
    --pretrain OpenRLHF/Llama-3-8b-sft-mixture --remote_rm_url examples/scripts/reward_func.py
    --label_key answer --pretrain_data Open-Orca/plain --ptx_coef 0.05 {FLAT_RL} --n_samples_per_prompt 8
    --bf16 --advantage_estimator reinforce --use_kl_loss --kl_estimator k3
    """,
    "flat, 0.9: GRPO with a reward function": f"""
    python3 -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 --actor_num_gpus_per_node 8 --ref_num_nodes 1
    --ref_num_gpus_per_node 8 --colocate_all_models --vllm_num_engines 8 --vllm_tensor_parallel_size 1
    --pretrain OpenRLHF/Llama-3-8b-sft-mixture --remote_rm_url examples/scripts/reward_func.py
    --label_key answer {FLAT_RL} --n_samples_per_prompt 8 --param_dtype bf16 --advantage_estimator group_norm
    --no_advantage_std_norm --use_kl_loss --kl_estimator k3 --dynamic_filtering
    --dynamic_filtering_reward_range 0.01 0.99 --enable_vllm_is_correction --vllm_enable_sleep
    --use_dynamic_batch --train_max_tokens_per_gpu 16192 --adam_betas 0.9 0.95 --ema_beta 0.992
    """,
    "flat, 0.9: agents, asynchronous": f"""
    python3 -m openrlhf.cli.train_ppo_ray --ref_num_nodes 1 --ref_num_gpus_per_node 4 --actor_num_nodes 1
    --actor_num_gpus_per_node 4 --colocate_actor_ref --vllm_num_engines 4 --vllm_tensor_parallel_size 1
    --vllm_gpu_memory_utilization 0.95 --pretrain OpenRLHF/Llama-3-8b-sft-mixture --label_key answer {FLAT_RL}
    --n_samples_per_prompt 8 --param_dtype bf16 --advantage_estimator reinforce_baseline --use_kl_loss
    --kl_estimator k2 --enable_vllm_is_correction --async_train --async_queue_size 1
    --agent_func_path examples/python/agent_func.py
    """,
    "training guide for 0.9: asynchronous": f"""
    python3 -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 --actor_num_gpus_per_node 4 --ref_num_nodes 1
    --ref_num_gpus_per_node 4 --colocate_actor_ref --vllm_num_engines 4 --vllm_tensor_parallel_size 1
    --pretrain OpenRLHF/Llama-3-8b-sft-mixture --remote_rm_url examples/scripts/reward_func.py
    --label_key answer {FLAT_RL} --n_samples_per_prompt 8 --bf16 --flash_attn --advantage_estimator group_norm
    --async_train --enable_prefix_caching
    """,
    "how-to guide for 0.8: REINFORCE++-baseline": """
    python -m openrlhf.cli.train_ppo_ray --pretrain OpenRLHF/Llama-3-8b-sft-mixture
    --remote_rm_url examples/scripts/reward_func.py --label_key answer --critic_pretrain None
    --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --apply_chat_template
    --actor_num_nodes 1 --actor_num_gpus_per_node 8 --critic_num_nodes 0 --reward_num_nodes 0
    --ref_num_nodes 0 --colocate_all_models --vllm_num_engines 8 --advantage_estimator reinforce_baseline
    --n_samples_per_prompt 4 --clip_eps_low 0.2 --clip_eps_high 0.28 --reward_clip_range 10.0
    --kl_target 0.02 --kl_horizon 10000 --kl_estimator k2 --use_kl_loss --rollout_batch_size 1024
    --train_batch_size 128 --micro_train_batch_size 4 --micro_rollout_batch_size 8 --prompt_max_len 1024
    --generate_max_len 1024 --bf16 --flash_attn --save_path ./checkpoint/rl --save_steps 50
    --max_ckpt_num 3 --load_checkpoint
    """,
    "dotted, 0.10.2 on: SFT": """
    deepspeed --module openrlhf.cli.train_sft --data.max_len 2048 --data.dataset Open-Orca/OpenOrca
    --data.input_key question --data.output_key response --train.batch_size 256 --train.micro_batch_size 2
    --data.max_samples 500000 --model.model_name_or_path meta-llama/Meta-Llama-3-8B
    --ckpt.output_dir ./checkpoint/llama3-8b-sft --ckpt.save_steps -1 --logger.logging_steps 1 --eval.steps -1
    --ds.zero_stage 2 --train.max_epochs 1 --ds.packing_samples --ds.param_dtype bf16 --adam.lr 5e-6
    --ds.attn_implementation flash_attention_2 --model.gradient_checkpointing_enable
    --data.input_template $'User: {}\\nAssistant: ' --ckpt.load_enable --ds.lora.alpha 32
    """,
    "dotted, 0.10.2 on: PPO, hybrid engine": """
    python3 -m openrlhf.cli.train_ppo_ray --ref.num_nodes 1 --ref.num_gpus_per_node 8 --reward.num_nodes 1
    --reward.num_gpus_per_node 8 --critic.num_nodes 1 --critic.num_gpus_per_node 8 --actor.num_nodes 1
    --actor.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all
    --vllm.gpu_memory_utilization 0.5 --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture
    --reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-700k --ckpt.output_dir /openrlhf/final
    --ckpt.path /openrlhf/ckpt --ckpt.save_hf --train.batch_size 128 --rollout.batch_size 1024
    --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 --rollout.n_samples_per_prompt 1
    --train.max_epochs 1 --data.max_len 2048 --data.max_samples 100000 --ds.zero_stage 3 --ds.param_dtype bf16
    --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 --train.ema_beta 0.99
    --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 --data.input_key context_messages
    --data.apply_chat_template --reward.normalize_enable --actor.gradient_checkpointing_enable
    --ds.packing_samples --vllm.sync_backend nccl --vllm.enforce_eager --vllm.enable_sleep --ds.enable_sleep
    --algo.advantage.is_correction_enable --ds.attn_implementation flash_attention_2
    """,
    "dotted, 0.10.2 on: agents, partial rollouts": """
    python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.num_gpus_per_node 4 --ref.num_nodes 1
    --ref.num_gpus_per_node 4 --train.colocate_actor_ref --vllm.num_engines 4 --vllm.tensor_parallel_size 1
    --vllm.gpu_memory_utilization 0.95 --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture
    --train.agent_func_path examples/python/agent_func.py --data.label_key answer
    --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 --data.input_key context_messages
    --data.apply_chat_template --ckpt.output_dir /openrlhf/final --ckpt.path /openrlhf/ckpt
    --train.batch_size 1024 --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --data.max_len 74240
    --train.dynamic_batch_enable --train.max_tokens_per_gpu 37120 --ds.zero_stage 3 --ds.param_dtype bf16
    --ds.packing_samples --algo.advantage.estimator reinforce_baseline --algo.kl.use_loss
    --algo.kl.estimator k2 --algo.kl.init_coef 1e-5 --actor.entropy_coef 0.0 --actor.adam.lr 5e-7
    --actor.gradient_checkpointing_enable --algo.advantage.is_correction_enable
    --algo.advantage.is_correction_type icepop --vllm.sync_backend nccl --vllm.enforce_eager
    --train.async_enable --train.partial_rollout_enable --train.async_queue_size 1
    """,
    "dotted, 0.10.2 on: GRPO without a spread": """
    python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.num_gpus_per_node 8
    --train.colocate_all --vllm.num_engines 8 --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture
    --reward.remote_url examples/scripts/reward_func.py --data.label_key answer
    --ckpt.output_dir /openrlhf/final --train.batch_size 128 --rollout.batch_size 128
    --rollout.n_samples_per_prompt 8
    --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 --data.input_key context_messages
    --data.apply_chat_template --algo.advantage.estimator group_norm --algo.advantage.no_std_norm
    --algo.kl.init_coef 0 --ds.param_dtype bf16 --vllm.enable_sleep --data.max_len 2048
    --rollout.max_new_tokens 1024
    """,
}

SMALL = {
    "flat supervised": "--train_batch_size 8 --micro_train_batch_size 2 --max_samples 16 --max_len 128",
    "flat RL": (
        "--actor_num_gpus_per_node 1 --vllm_num_engines 1 --vllm_tensor_parallel_size 1 --zero_stage 2 "
        "--rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 16 --micro_train_batch_size 4 "
        "--micro_rollout_batch_size 4 --prompt_max_len 64 --generate_max_len 16 --max_samples 8"
    ),
    "dotted supervised": (
        "--train.batch_size 8 --train.micro_batch_size 2 --data.max_samples 16 --data.max_len 128"
    ),
    "dotted RL": (
        "--actor.num_gpus_per_node 1 --vllm.num_engines 1 --vllm.tensor_parallel_size 1 --ds.zero_stage 2 "
        "--rollout.batch_size 4 --rollout.n_samples_per_prompt 4 --train.batch_size 16 "
        "--data.max_len 80 --rollout.max_new_tokens 16 --data.max_samples 8"
    ),
}


def write(path: Path, rows: Iterable[Mapping]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path, count: int = 16) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()[:count]]


@pytest.fixture
def here(knowing, reward_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Maps a name in a document to what stands for it here."""
    files, data = knowing.files, tmp_path / "data"
    user = lambda text: [{"role": "user", "content": text}]
    reply = lambda prompt, text: [*user(prompt), {"role": "assistant", "content": text}]
    made = {
        "Open-Orca/OpenOrca": [{"question": r["input"], "response": r["output"]} for r in rows_of(files.sft)],
        "Open-Orca/plain": [{"context_messages": r["input"]} for r in rows_of(files.pretrain)],
        "OpenRLHF/preference_dataset_mixture2_and_safe_pku": [
            {name: reply(r["prompt"], r[name]) for name in ("chosen", "rejected")}
            for r in rows_of(files.pairs)
        ],
        "Dylan2048/ultrafeedback-unpaired-preferences": [
            {"instruction": r["input"], "response": r["output"], "score": int(r["label"])}
            for r in rows_of(files.unpaired)
        ],
        "OpenRLHF/prompt-collection-v0.1": [
            {"context_messages": user(r["input"]), "answer": r["label"]} for r in rows_of(files.prompts)
        ],
    }
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(Path(__file__).parents[2] / "examples")
    found = {name: str(write(data / f"{name.replace('/', '-')}.jsonl", rows)) for name, rows in made.items()}
    models = dict.fromkeys(
        ("meta-llama/Meta-Llama-3-8B", "OpenRLHF/Llama-3-8b-sft-mixture"), str(knowing.chat)
    )
    agent = {"examples/python/agent_func.py": "examples/python/agent_retry.py"}
    scorer = {"OpenRLHF/Llama-3-8b-rm-700k": str(reward_model)}
    return found | models | agent | scorer | {"/openrlhf": str(tmp_path)}


@pytest.fixture
def run(here: dict[str, str], tmp_path: Path) -> Callable[[str, str], str]:
    """Returns a function that runs a command with further flags and returns what it printed."""

    def run(command: str, more: str) -> str:
        for name, place in sorted(here.items(), key=lambda item: -len(item[0])):
            command = command.replace(name, place)
        words = shlex.split(re.sub(r"\$'([^']*)'", lambda m: shlex.quote(m[1].replace("\\n", "\n")), command))
        start = next(i for i, word in enumerate(words) if word.startswith("openrlhf.cli."))
        log = tmp_path / "log"
        run_ranks([*words[start:], *shlex.split(more), *RUN], log=log, timeout=400)
        return log.read_text()

    return run


RUN = ("--logger.run_dir", "run")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_means_what_it_meant(name: str, run: Callable[[str, str], str], tmp_path: Path) -> None:
    """The command trains for every step and leaves a model."""
    command = DOCUMENTS[name]
    kind = f"{name.partition(',')[0]} {'RL' if 'ppo_ray' in command else 'supervised'}"
    printed = run(command, SMALL.get(kind, SMALL["flat RL"]))
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert list(metrics) == [1, 2] or ("--dynamic_filtering" in command and list(metrics) == [1])
    assert all(math.isfinite(step["grad_norm"]) for step in metrics.values())
    assert "error" not in printed.lower().replace("error_", "")
    models = [*(tmp_path / "checkpoint").glob("*/*.safetensors"), *(tmp_path / "final").glob("*.safetensors")]
    assert models
    if "--ptx_coef" in command:
        assert metrics[1]["policy/ptx_loss"] > 0
    if "async" in command:
        assert metrics[2]["rollout/staleness_max"] <= 1
    if "flash" in command:
        assert "the package flash_attn is not installed" in printed
