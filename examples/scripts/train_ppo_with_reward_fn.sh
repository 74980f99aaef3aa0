#!/usr/bin/env bash
# PPO with a critic and a Python reward function. Policy and reference share GPUs; the critic and the engines
# have separate ones.
# Needs 8 GPUs of 80 GB: 2 for policy and reference, 2 for the critic, 4 for sampling. Writes the policy to
# $OUT.
set -euo pipefail

EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MODEL=${MODEL:-Qwen/Qwen3-4B-Base}
PROMPTS=${PROMPTS:-agentica-org/DeepScaleR-Preview-Dataset}
REWARD=${REWARD:-$EXAMPLES/python/math_reward_func.py} # reward_func(queries, prompts, labels)
OUT=${OUT:-ckpt/ppo_reward_fn}

python -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$MODEL" \
    --actor.num_nodes 1 \
    --actor.num_gpus_per_node 2 \
    --actor.gradient_checkpointing_enable \
    --actor.adam.lr 5e-7 \
    --critic.num_nodes 1 \
    --critic.num_gpus_per_node 2 \
    --critic.adam.lr 9e-6 \
    --reward.remote_url "$REWARD" \
    --data.prompt_dataset "$PROMPTS" \
    --data.input_key problem \
    --data.label_key answer \
    --data.apply_chat_template \
    --data.max_len 4096 \
    --rollout.batch_size 1024 \
    --rollout.max_new_tokens 3072 \
    --vllm.num_engines 2 \
    --vllm.tensor_parallel_size 2 \
    --vllm.gpu_memory_utilization 0.9 \
    --train.colocate_actor_ref \
    --train.batch_size 128 \
    --train.dynamic_batch_enable \
    --train.max_tokens_per_gpu 16384 \
    --algo.advantage.estimator gae \
    --algo.kl.init_coef 0.01 \
    --ds.zero_stage 3 \
    --ds.adam_offload \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 20 \
    --ckpt.load_enable \
    "$@"
