#!/usr/bin/env bash
# DAPO: group-normalized advantages, a wider upper clip, dynamic filtering of groups whose answers are all
# right or all wrong, and a soft penalty for answers near the length limit.
# Needs 8 GPUs of 80 GB. Writes the policy to $OUT.
set -euo pipefail

EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MODEL=${MODEL:-Qwen/Qwen3-4B-Base}
PROMPTS=${PROMPTS:-agentica-org/DeepScaleR-Preview-Dataset}
REWARD=${REWARD:-$EXAMPLES/python/math_reward_func.py}
OUT=${OUT:-ckpt/dapo}
NODES=${NODES:-1}
GPUS=${GPUS:-8} # per node

python -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$MODEL" \
    --actor.num_nodes "$NODES" \
    --actor.num_gpus_per_node "$GPUS" \
    --actor.gradient_checkpointing_enable \
    --actor.adam.lr 5e-7 \
    --actor.eps_clip_low_high 0.2 0.27 \
    --reward.remote_url "$REWARD" \
    --reward.overlong_buffer_len 2048 \
    --reward.overlong_penalty_factor 1.0 \
    --data.prompt_dataset "$PROMPTS" \
    --data.input_key problem \
    --data.label_key answer \
    --data.apply_chat_template \
    --data.max_len 9216 \
    --rollout.batch_size 128 \
    --rollout.n_samples_per_prompt 8 \
    --rollout.max_new_tokens 8192 \
    --vllm.num_engines $((NODES * GPUS)) \
    --vllm.tensor_parallel_size 1 \
    --vllm.gpu_memory_utilization 0.5 \
    --vllm.enable_sleep \
    --train.colocate_all \
    --train.batch_size 128 \
    --train.dynamic_batch_enable \
    --train.max_tokens_per_gpu 16384 \
    --algo.advantage.estimator group_norm \
    --algo.dynamic_filtering_enable \
    --algo.dynamic_filtering_range 0 1 \
    --algo.kl.use_loss \
    --algo.kl.estimator k3 \
    --algo.kl.init_coef 1e-3 \
    --ds.zero_stage 3 \
    --ds.enable_sleep \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 20 \
    --ckpt.load_enable \
    "$@"
